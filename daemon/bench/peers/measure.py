"""The rounds of `bench peers`: every arm of everybody in turns; whoever fails is named and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from deepinfer.clients import Client
from deepinfer.daemon.bench.load import NeverTogether, Streams, random_prompt, until_together, while_all_decode
from deepinfer.daemon.bench.peers.config import Arm, PeersBench
from deepinfer.daemon.bench.peers.process import PeerFailed, Run

OURS = "ours"
WARM_TOKENS = 4


class Engine(Protocol):
    """A daemon or a peer."""

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
        """Greedy, past end tokens. Raises PeerFailed."""
        ...


class Ours:
    """The daemon, over its socket."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
        with Streams(self._client) as streams:
            began = time.perf_counter()
            for prompt in prompts:
                streams.send(list(prompt), new_tokens)
            streams.until_all_done()
        arrivals = [[moment - began for moment in seen.tokens] for seen in streams.seen]
        return Run(arrivals, [seen.ids[0] for seen in streams.seen])


class Member(NamedTuple):
    """Somebody who is measured."""

    engine: Engine
    starts_together: bool


class Measured(NamedTuple):
    rates: dict[str, dict[str, list[float]]]
    """Arm name -> member name -> tokens/s of each round that it lived."""
    first: dict[str, list[int]]
    """Member name -> first tokens of the prompts of the arm with the most streams."""
    failed: dict[str, str]
    """Member name -> where it failed, and why."""


def measure(
    bench: PeersBench,
    members: Mapping[str, Member],
    vocab_size: int,
    say: Callable[[str], None],
) -> Measured:
    arms, living, failed = bench.arms(), dict(members), {}
    rates: dict[str, dict[str, list[float]]] = {arm.name: {name: [] for name in members} for arm in arms}
    first: dict[str, list[int]] = {}

    def attempt(name: str, arm: Arm, new_tokens: int, use: Callable[[str, Arm, Run], None]) -> None:
        prompts = [random_prompt(arm.context, number, vocab_size) for number in range(arm.streams)]
        try:
            until_together(lambda: use(name, arm, living[name].engine.run(prompts, new_tokens)))
        except (PeerFailed, NeverTogether) as error:
            failed[name] = f"{arm.name}: {error}"
            say(f"{name} failed in {arm.name}: {error}")
            del living[name]

    def warmed(name: str, arm: Arm, run: Run) -> None:
        pass

    def measured(name: str, arm: Arm, run: Run) -> None:
        rates[arm.name][name].append(rate_of(arm, run))
        if len(run.first) > len(first.get(name, ())):
            first[name] = list(run.first)

    for arm in _warm_arms(arms):
        for name in list(living):
            attempt(name, arm, WARM_TOKENS, warmed)
    for number in range(bench.rounds):
        say(f"round {number + 1} of {bench.rounds}")
        for arm in arms:
            for name in list(living):
                attempt(name, arm, bench.new_tokens_of(arm, living[name].starts_together), measured)
    return Measured(rates, first, failed)


def _warm_arms(arms: Sequence[Arm]) -> list[Arm]:
    """Every number of streams once, behind the shortest prompts: kernels are compiled and programs recorded then."""
    shortest = min(arm.context for arm in arms)
    return [Arm("decode", streams, shortest) for streams in sorted({arm.streams for arm in arms})]


def rate_of(arm: Arm, run: Run) -> float:
    """Prefill: prompt tokens over the time to the first token. Decode: tokens per second over all streams while every
    one of them decodes. Raises PeerFailed where a stream is empty, NeverTogether."""
    if not all(run.arrivals):
        raise PeerFailed(f"{arm.name}: a stream ended without a token")
    if arm.kind == "prefill":
        return arm.context / run.arrivals[0][0]
    tokens, seconds = while_all_decode(run.arrivals)
    if not seconds:
        raise NeverTogether(len(run.arrivals))
    return tokens / seconds
