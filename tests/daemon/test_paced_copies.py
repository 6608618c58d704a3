"""A swap beside a request that decodes pauses between its slices, and goes on at once when nobody decodes."""

from __future__ import annotations

import pytest
import torch
from forced_swaps import force_swaps
from leftovers import settled

from deepinfer.daemon import engine_host
from deepinfer.daemon.engine import Engine
from deepinfer.stages import pace

PROMPT = list(range(1, 30))
FIELDS = {"ignore_eos": True, "logprobs": 1}
SHORT, LONG = 12, 200


@pytest.mark.parametrize("share", [1e-9, 1.0])
def test_a_swap_whose_pauses_are_endless_ends_when_the_other_request_does(tiny_path, monkeypatch, share):
    """With a share of 1 there are no pauses: the control arm, in which the shorter request ends first."""
    monkeypatch.setattr(engine_host, "SHARE", share)
    monkeypatch.setattr(pace, "SLICE_BYTES", 1)
    slices: list[tuple[int, bool]] = []
    """Rows, and whether the other request was there."""

    def noting(destination: torch.Tensor, source: torch.Tensor) -> None:
        totals = [entry.total for entry in list(engine.host.residency.entries.values())]
        slices.append((len(source), len(PROMPT) + LONG - 1 in totals))
        destination.copy_(source)

    settings = {"batch_invariant": True, "block_size": 8, "num_blocks": 64, "prefix_cache": False, "threads": 1}
    with Engine(tiny_path, copy=noting, **settings) as engine:
        prompts = {"moved": (PROMPT, SHORT), "other": (PROMPT[::-1], LONG)}
        alone = {who: engine.complete(prompt, max_new_tokens=new, **FIELDS) for who, (prompt, new) in prompts.items()}
        assert slices == []
        done: set[int] = set()
        total = len(PROMPT) + SHORT - 1
        force_swaps(engine, lambda e: e.total == total and e.yielded == 3 and e.rid not in done and not done.add(e.rid))
        other = engine.generate(prompts["other"][0], max_new_tokens=LONG, **FIELDS)
        next(event for event in other if getattr(event, "ids", ()))
        moved = engine.generate(PROMPT, max_new_tokens=SHORT, **FIELDS)
        answers = {"other": other.result(), "moved": moved.result()}
        blocks = -(-(len(PROMPT) + 2) // 8)
        assert sum(rows for rows, _ in slices) == 2 * blocks
        if share == 1.0:
            assert slices == [(blocks, True)] * 2
        else:
            assert slices[:2] == [(1, True), (blocks - 1, False)]
        for who, answer in answers.items():
            assert (answer.ids, answer.logprobs) == (alone[who].ids, alone[who].logprobs)
        settled(engine)
