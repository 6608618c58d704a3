"""The experiments of `bench swap`: what a request is, who sends it when, and what is measured of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import torch

from deepinfer.clients import Client
from deepinfer.daemon.bench.goals import Goal
from deepinfer.daemon.bench.load import Seen, Streams, random_prompt, settled_counters
from deepinfer.daemon.bench.swap_config import BLOCK_SIZE, FITTING, OVERSUBSCRIBED, STAYING, SwapBench
from deepinfer.daemon.bench.swap_counters import SWAP_COUNTERS, Way, seconds_of_a_move
from deepinfer.daemon.stress.copies import PlainCopies

TRIES = 5
"""Pairs that are sent for one that swaps."""


class Experiment:
    """`round` measures once; `report` and `goals` speak of all rounds."""

    def __init__(self, bench: SwapBench, client: Client) -> None:
        self.bench = bench
        self.client = client
        self._vocab_size = int(client.connection.limits["vocab_size"])

    def round(self) -> None:
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        raise NotImplementedError

    def goals(self) -> list[Goal]:
        raise NotImplementedError

    def prompt(self, tokens: int, number: int) -> list[int]:
        return random_prompt(tokens, number, self._vocab_size)

    def counters(self) -> dict[str, float]:
        return settled_counters(self.client)


class Pair:
    """Two requests, the second of which does not fit beside the first and is sent when that one has its first token:
    one swap and one resume. With `swap` off it is sent at the end of the first."""

    def __init__(self, experiment: Experiment, streams: Streams, blocks: int, swap: bool = True) -> None:
        self._streams = streams
        self._swap = swap
        self._new = experiment.bench.pair_tokens
        self._prompt = experiment.prompt(blocks * BLOCK_SIZE + 1 - self._new, 1)
        self.first = streams.send(self._prompt, self._new)
        self.second: Seen | None = None

    def over(self) -> bool:
        """Sends the second one when it is due."""
        if self.second is None and (self.first.tokens if self._swap else self.first.done):
            self.second = self._streams.send(self._prompt, self._new)
        return bool(self.first.done and self.second and self.second.done)


class Forced(Experiment):
    """The copies of single swaps, beside a plain copy of as many bytes, and what both requests of a pair saw."""

    def __init__(self, bench: SwapBench, client: Client) -> None:
        super().__init__(bench, client)
        self._ways = {name: Way(name) for name in SWAP_COUNTERS}
        self._moved: list[Seen] = []
        self._stayed: list[Seen] = []
        self._pair()  # The first touch of the host's pages is not what later swaps cost.
        counters = self.counters()
        swaps = int(counters["requests_swapped_total"])
        if not swaps:
            raise click.ClickException("the second request did not push the first one out; does the host have memory?")
        rows = int(counters["kv_cpu_offload_blocks_total"]) // swaps
        block_bytes = int(client.status()["engine"]["block_bytes"])
        self._plain = PlainCopies(torch.empty((2 * rows, block_bytes), dtype=torch.uint8), rows)

    def _pair(self) -> Pair:
        with Streams(self.client) as streams:
            pair = Pair(self, streams, self.bench.num_blocks)
            streams.until(pair.over)
        return pair

    def _swapping_pair(self) -> Pair:
        """On a busy machine the first one may have ended before the second one was there: then once more."""
        before = self.counters()
        for _ in range(TRIES):
            pair = self._pair()
            after = self.counters()
            if after["requests_swapped_total"] > before["requests_swapped_total"]:
                for way in self._ways.values():
                    way.note(before, after)
                return pair
        raise click.ClickException(
            f"in {TRIES} pairs the first request ended before the second one could push it out; use more --pair-tokens"
        )

    def round(self) -> None:
        for _ in range(self.bench.iterations):
            pair = self._swapping_pair()
            self._plain.measure()
            self._moved.append(pair.first)
            self._stayed += [pair.second] if pair.second else []

    def report(self) -> dict[str, Any]:
        return {
            "swaps": len(self._moved),
            "plain_copy": self._plain.rates(statistics.median),
            **self._directions(),
            "moved": _seen_by(self._moved),
            "stayed": _seen_by(self._stayed),
        }

    def _directions(self) -> dict[str, dict[str, Any]]:
        plain = self._plain.rates(statistics.median)
        return {name: way.report(plain[name]) for name, way in self._ways.items()}

    def goals(self) -> list[Goal]:
        ways = self._directions()
        copies = max(way["copies_per_swap"] for way in ways.values())
        return [
            *(Goal(f"swap {name}, times a plain copy", way["times_a_plain_copy"], 1.5) for name, way in ways.items()),
            Goal("copies of a swap, to runs of rows", copies, 1.0),
        ]


class Beside(Experiment):
    """How much swaps slow down those that stay: step by step while a copy runs, and over their whole answers."""

    def __init__(self, bench: SwapBench, client: Client) -> None:
        super().__init__(bench, client)
        self._steps: dict[str, list[float]] = {"alone": [], "during a copy": []}
        self._tpot: dict[str, list[float]] = {"swapping": [], "in turns": []}
        self._moves = 0

    def round(self) -> None:
        staying, _ = self._run(None)
        self._steps["alone"] += [end - begin for seen in staying for begin, end in seen.gaps]
        for arm, swap in (("swapping", True), ("in turns", False)):
            before = self.counters()
            staying, moves = self._run(swap)
            self._tpot[arm] += [seen.tpot for seen in staying]
            self._moves += len(moves)
            took = seconds_of_a_move(before, self.counters())
            self._steps["during a copy"] += list(_gaps_during(staying, moves, took))

    def _run(self, swap: bool | None) -> tuple[list[Seen], list[tuple[float, str]]]:
        """Those that stay, of a higher priority, while pairs come and go (None: nobody else); and how others moved."""
        tokens = self.bench.staying_blocks * BLOCK_SIZE // 2
        pairs: list[Pair] = []
        with Streams(self.client) as streams:
            staying = [streams.send(self.prompt(tokens, 10 + number), tokens, priority=1) for number in range(STAYING)]
            streams.until(lambda: all(seen.tokens for seen in staying))

            def over() -> bool:
                all_over = all(pair.over() for pair in pairs)
                if all(seen.done for seen in staying):
                    return all_over
                if swap is not None and all_over:
                    pairs.append(Pair(self, streams, self.bench.beside_blocks, swap))
                return False

            streams.until(over)
        return staying, [move for pair in pairs for move in pair.first.moves]

    def report(self) -> dict[str, Any]:
        return {
            "moves": self._moves,
            "step_ms": {name: _median_ms(values) for name, values in self._steps.items()},
            "steps_measured": {name: len(values) for name, values in self._steps.items()},
            "tpot_ms": {name: _median_ms(values) for name, values in self._tpot.items()},
        }

    def goals(self) -> list[Goal]:
        copying, alone = _median_ms(self._steps["during a copy"]), _median_ms(self._steps["alone"])
        swapping, in_turns = _median_ms(self._tpot["swapping"]), _median_ms(self._tpot["in turns"])
        return [
            Goal("step of those that stay, during a copy to alone", _ratio(copying, alone), 1.1),
            Goal("TPOT of those that stay, beside swaps to turns", _ratio(swapping, in_turns), 1.1),
        ]


def _gaps_during(
    staying: Sequence[Seen], moves: Sequence[tuple[float, str]], took: Mapping[str, float]
) -> Iterator[float]:
    """`preempted` and `resumed` are told between two steps, when the copy is over: it ran beside the step before, in
    which the one that moved had no row, and beside those that ended in the `took` seconds before."""
    for moment, event in moves:
        for seen in staying:
            gaps = [(begin, end) for begin, end in seen.gaps if end <= moment]
            if gaps and moment <= seen.tokens[-1]:
                first = min(moment - took[event], gaps[-1][1])
                yield from (end - begin for begin, end in gaps if end >= first)


class Oversubscribed(Experiment):
    """Tokens per second of eight requests over a pool for two: all at once, and in waves of two."""

    def __init__(self, bench: SwapBench, client: Client) -> None:
        super().__init__(bench, client)
        self._rates: dict[str, list[float]] = {"all at once": [], "fitting waves": []}
        self._moved: list[Seen] = []
        self._swaps = 0

    def round(self) -> None:
        before = self.counters()["requests_swapped_total"]
        self._rates["all at once"].append(self._rate(OVERSUBSCRIBED))
        self._swaps += int(self.counters()["requests_swapped_total"] - before)
        self._rates["fitting waves"].append(self._rate(FITTING))

    def _rate(self, at_a_time: int) -> float:
        tokens = self.bench.fitting_blocks * BLOCK_SIZE // 2
        began = time.perf_counter()
        with Streams(self.client) as streams:

            def over() -> bool:
                running = sum(not seen.done for seen in streams.seen)
                for _ in range(min(at_a_time - running, OVERSUBSCRIBED - len(streams.seen))):
                    streams.send(self.prompt(tokens, 20 + len(streams.seen)), tokens)
                return all(seen.done for seen in streams.seen)

            streams.until(over)
        if at_a_time == OVERSUBSCRIBED:
            self._moved += [seen for seen in streams.seen if seen.moves]
        return OVERSUBSCRIBED * tokens / (time.perf_counter() - began)

    def _ratios(self) -> list[float]:
        return [a / b for a, b in zip(self._rates["all at once"], self._rates["fitting waves"], strict=True)]

    def report(self) -> dict[str, Any]:
        return {
            "swaps": self._swaps,
            "tokens_per_s": {name: statistics.median(values) for name, values in self._rates.items()},
            "ratios": self._ratios(),
            "moved": _seen_by(self._moved),
        }

    def goals(self) -> list[Goal]:
        ratio = statistics.median(self._ratios())
        return [Goal("tokens/s of 8 over a pool for 2, to fitting waves", ratio, 0.8, "at least")]


def _seen_by(requests: Sequence[Seen]) -> dict[str, Any]:
    """As the clients saw it, medians."""
    return {
        "requests": len(requests),
        "tpot_ms": _median_ms([seen.tpot for seen in requests]),
        "longest_gap_ms": _median_ms([max(end - begin for begin, end in seen.gaps) for seen in requests]),
    }


def _median_ms(seconds: Sequence[float]) -> float | None:
    return 1000 * statistics.median(seconds) if seconds else None


def _ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or to is None else value / to
