"""Host memory for swapped requests where the system does not pin what it is asked to."""

from __future__ import annotations

import logging

import torch

from deepinfer.stages.memory import arena
from deepinfer.stages.memory.arena import Copy, HostArena

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
