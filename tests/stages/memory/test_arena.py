"""Host memory for swapped requests: which rows a payload gets, and what happens where the system does not pin them."""

from __future__ import annotations

import logging
import random
from itertools import pairwise

import pytest
import torch

from deepinfer.stages.memory import arena
from deepinfer.stages.memory.arena import Copy, HostArena
from deepinfer.stages.memory.free_rows import FreeRows

ROW_BYTES = 100


def test_pieces_are_pageable_from_the_first_one_that_cannot_be_pinned(monkeypatch, caplog):
    empty, asked = torch.empty, []

    def reluctant(shape, dtype, pin_memory=False):
        asked.append(pin_memory)
        if pin_memory and len(asked) > 2:
            raise RuntimeError("no more pages to pin")
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(arena, "PIECE_BYTES", 4 * ROW_BYTES)
    monkeypatch.setattr(arena.torch, "empty", reluctant)
    with caplog.at_level(logging.WARNING):
        host = HostArena(18 * ROW_BYTES, ROW_BYTES, pin=True)
    assert asked == [True, True, True, False, False, False]
    assert host.pinned is False
    assert "no more pages to pin" in caplog.text
    assert host.take(18) == list(range(18))
    assert [host.view(Copy(0, row, 1)).shape for row in (0, 11, 17)] == [(1, ROW_BYTES)] * 3


def test_pinned_or_not_is_what_was_done(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(arena.torch, "empty", lambda shape, dtype, pin_memory=False: empty(shape, dtype=dtype))
    assert HostArena(10 * ROW_BYTES, ROW_BYTES, pin=True).pinned is True
    assert HostArena(10 * ROW_BYTES, ROW_BYTES).pinned is False


@pytest.mark.parametrize("piece", [1, 4, 7])
def test_rows_that_come_and_go_in_any_order_are_each_free_or_taken_and_neighbours_are_one_run(piece):
    for seed in range(60):
        rng = random.Random(seed)
        total = rng.randint(0, 40)
        free, taken = FreeRows(total, piece), []
        for _ in range(60):
            if free.count and rng.random() < 0.5:
                longest = max(map(len, free._runs))
                count = rng.randint(1, free.count)
                rows = free.take(count)
                assert rows == sorted(rows)
                assert len(rows) == count
                if count <= longest:
                    assert rows == list(range(rows[0], rows[0] + count)), "it would have fitted into one run"
                    assert rows[0] // piece == rows[-1] // piece
                taken.append(rows)
            elif taken:
                rows = taken.pop(rng.randrange(len(taken)))
                free.give_back(rng.sample(rows, len(rows)))
            rows = [row for run in free._runs for row in run]
            assert rows == sorted(rows)
            assert free.count == len(rows)
            assert sorted(rows + [row for some in taken for row in some]) == list(range(total))
            for a, b in pairwise(free._runs):
                assert a.stop < b.start or a.stop % piece == 0, "two runs that could be one"


def test_memory_that_was_never_touched_stays_so_while_payloads_fit_without_it():
    host = HostArena(100 * ROW_BYTES, ROW_BYTES)
    for _ in range(20):
        first, second = host.take(10), host.take(5)
        assert (first, second) == (list(range(10)), list(range(10, 15)))
        host.give_back(second)
        host.give_back(first)


def test_a_payload_takes_the_shortest_gap_that_holds_it_and_is_one_copy(monkeypatch):
    monkeypatch.setattr(arena, "PIECE_BYTES", 20 * ROW_BYTES)
    host = HostArena(40 * ROW_BYTES, ROW_BYTES)
    held = [host.take(count) for count in (6, 2, 3, 2)]
    host.give_back(held[0])
    host.give_back(held[2])
    rows = host.take(3)
    assert rows == held[2]
    assert host.plan([7, 8, 9], rows) == [Copy(7, rows[0], 3)]
    assert host.plan([7, 9, 10], rows) == [Copy(7, rows[0], 1), Copy(9, rows[1], 2)]
    assert host.plan([18, 19, 20], [18, 19, 20]) == [Copy(18, 18, 2), Copy(20, 20, 1)], "a piece ends after row 19"
    assert host.plan([], []) == []
    assert Copy(7, 3, 5).part(2, 2) == Copy(9, 5, 2)


def test_more_rows_than_are_free_are_refused_and_nothing_is_taken():
    host = HostArena(10 * ROW_BYTES, ROW_BYTES)
    assert host.take(8) is not None
    assert host.take(3) is None
    assert (host.free_rows, host.used_bytes) == (2, 8 * ROW_BYTES)
    assert HostArena(0, ROW_BYTES).take(1) is None
