"""Greedy answers of two engines that may round differently, compared token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.daemon.engine import Engine

_TOP = 5


def answer(engine: Engine, prompt: Sequence[int], length: int) -> list[Any]:
    """`length` greedy tokens with their log probabilities and those of the likeliest `_TOP`."""
    result = engine.complete(list(prompt), max_new_tokens=length, logprobs=_TOP, ignore_eos=True)
    return list(result.logprobs)


def follow(engine: Engine, prompt: Sequence[int], wanted: Sequence[Any], bound: float) -> int:
    """Lets the engine continue the prompt as `wanted`, what another one answered. Log probabilities of the same tokens
    must differ by at most `bound`. Where it chooses another token, both must be as close to one another as twice that
    in both engines; it is then given the wanted one and goes on. Returns how often it had to be.
    """
    ids, at, given = [entry.id for entry in wanted], 0, 0
    while at < len(ids):
        for entry in answer(engine, [*prompt, *ids[:at]], len(ids) - at):
            want, at = wanted[at], at + 1
            if entry.id == want.id:
                apart = abs(entry.logprob - want.logprob)
                assert apart <= bound, f"token {at - 1}: log probabilities differ by {apart:.3g}"
                continue
            for name, top in (("it", dict(entry.top)), ("the other", dict(want.top))):
                apart = abs(top.get(entry.id, -1e9) - top.get(want.id, 1e9))
                assert apart <= 2 * bound, f"token {at - 1}: {name} has {entry.id} and {want.id} {apart:.3g} apart"
            given += 1
            break
    return given
