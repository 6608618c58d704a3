"""`deepinfer-daemon bench concurrency`: a load at several concurrencies and KV formats, as its clients see it.

Daemons are driven over their sockets. A pass is the whole load once; every concurrency of every KV format has one pass
in each round. No pass finds what another one left in the prefix cache, because each has a cache salt of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click

from deepinfer.clients import Client
from deepinfer.daemon.bench.concurrency_config import ConcurrencyBench
from deepinfer.daemon.bench.concurrency_report import print_report, write_plot
from deepinfer.daemon.bench.conditions import conditions, engine_facts, served_sha256
from deepinfer.daemon.bench.dataset import Dataset, read_dataset
from deepinfer.daemon.bench.drive import drive
from deepinfer.daemon.bench.load import running_daemon, settled_counters, started_daemon
from deepinfer.daemon.bench.results import check_plot, write_json
from deepinfer.daemon.bench.rounds import Samples, Spread, noise, ratio_of, spread_of
from deepinfer.daemon.bench.served import Asked, Pass, cached_tokens, serve_result
from deepinfer.daemon.bench.workload import Job, arrivals, file_jobs, random_jobs, random_lengths

NEW_TOKENS = 64
ERRORS_SHOWN = 3
COUNTED = ("decode_steps_total", "decode_context_tokens_total", "decode_seconds")
DEFINITIONS = {
    "points": "keys and their meaning are those of the result files of `vllm bench serve`; rounds count as one long "
    "run; `deepinfer` has what is our own",
    "gb_per_s": "bytes that decode steps read (step_weight_bytes of the weights for every step, and the stored keys, "
    "values and scales of every row), over the seconds spent in decode steps, as the engine counts them; prefill is "
    "not in it",
    "tokens_per_s": "output_throughput of each round: median, least and greatest",
    "ratios": "of output_throughput, round by round; low to high holds the true median with 95 % probability",
}


def run_concurrency_bench(bench: ConcurrencyBench, output: Path | None, plot: Path | None) -> int:
    """Prints a table; returns the exit code: 1 where nothing was served. Raises ConfigError."""
    bench.check()
    check_plot(plot)
    dataset = None if bench.dataset is None else read_dataset(Path(bench.dataset))
    if dataset is not None and dataset.skipped:
        click.echo(f"{dataset.skipped} conversations have no first question and answer: left out", err=True)
    report = _measure(bench, dataset)
    print_report(report)
    write_json(report, output)
    write_plot(report, plot)
    return 0 if all(point["completed"] for point in report["points"]) else 1


class _Counted(NamedTuple):
    """What the engine counted during passes."""

    steps: float = 0
    context_tokens: float = 0
    seconds: float = 0.0


@dataclass
class _Point:
    kv_format: str
    level: int
    passes: list[Pass] = field(default_factory=list)
    counted: list[_Counted] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.kv_format}, c={self.level}"

    def rates(self) -> list[float]:
        """Tokens per second of each pass."""
        return [sum(len(seen.tokens) for seen in run.seen if seen.done) / run.seconds for run in self.passes]


def _measure(bench: ConcurrencyBench, dataset: Dataset | None) -> dict[str, Any]:
    points: dict[tuple[str, int], _Point] = {}
    statuses: dict[str, dict[str, Any]] = {}
    sha256: str | None = None
    with ExitStack() as stack:
        for number, kv_format, client in _visits(bench, stack):
            if kv_format not in statuses:
                statuses[kv_format] = client.status()
            sha256 = sha256 or served_sha256(client, statuses[kv_format])
            for level in bench.levels:
                point = points.setdefault((kv_format, level), _Point(kv_format, level))
                jobs = _jobs(bench, level, dataset, client, statuses[kv_format])
                salt = f"{bench.seed}/{number}/{level}/{time.time_ns()}"
                before = settled_counters(client)
                starts = arrivals(len(jobs), bench.request_rate, bench.seed)
                run = drive(client, jobs, starts, level, ignore_eos=bench.ignore_eos, cache_salt=salt)
                after = settled_counters(client)
                point.passes.append(run)
                point.counted.append(_Counted(*(after[name] - before[name] for name in COUNTED)))
    ordered = sorted(points.values(), key=lambda point: list(points).index((point.kv_format, point.level)))
    rates = {point.name: point.rates() for point in ordered}
    ratios = _ratios(list(statuses), bench.levels, rates)
    return {
        **conditions(),
        "model": next(iter(statuses.values()))["model"],
        "model_sha256": sha256,
        "settings": asdict(bench) | {"request_rate": _finite(bench.request_rate)},
        "definitions": DEFINITIONS,
        "engines": {name: engine_facts(status) for name, status in statuses.items()},
        "points": [_point(bench, point, statuses[point.kv_format]) for point in ordered],
        "tokens_per_s": {name: spread_of(values)._asdict() for name, values in rates.items()},
        "ratios": {name: ratio._asdict() for name, ratio in ratios.items()},
        "too_noisy": noise(ratios, bench.rounds),
        "errors": _errors(ordered),
    }


def _visits(bench: ConcurrencyBench, stack: ExitStack) -> Iterator[tuple[int, str, Client]]:
    """Round, KV format and daemon, as they take turns."""
    clients: dict[str, Client] = {}
    if bench.connect is not None:
        client = stack.enter_context(running_daemon(bench.connect))
        clients = {client.status()["engine"]["kv_cache_dtype"]: client}
    elif not bench.in_turn:
        clients = {name: stack.enter_context(started_daemon(*bench.options(name))) for name in bench.formats}
    for number in range(bench.rounds):
        click.echo(f"round {number + 1} of {bench.rounds}", err=True)
        for name in clients or bench.formats:
            if clients:
                yield number, name, clients[name]
            else:
                with started_daemon(*bench.options(name)) as client:
                    yield number, name, client


def _jobs(
    bench: ConcurrencyBench, level: int, dataset: Dataset | None, client: Client, status: Mapping[str, Any]
) -> list[Job]:
    """The same in every round and for every KV format."""
    count, default = bench.prompts(level), bench.max_new_tokens or NEW_TOKENS
    if dataset is not None:
        return file_jobs(dataset.entries, count, bench.max_new_tokens, default, client, bench.seed)
    lengths = random_lengths(count, bench.input_len, bench.range_ratio, bench.lognormal_sigma, bench.seed)
    return random_jobs(lengths, default, int(status["limits"]["vocab_size"]), bench.seed)


def _point(bench: ConcurrencyBench, point: _Point, status: Mapping[str, Any]) -> dict[str, Any]:
    asked = Asked(
        status["model"], bench.prompts(point.level) * len(point.passes), point.level, bench.request_rate
    )  # fmt: skip
    seen = [one for run in point.passes for one in run.seen]
    return {
        **serve_result(asked, point.passes, bench.save_detailed),
        "deepinfer": {
            "kv_cache_dtype": status["engine"]["kv_cache_dtype"],
            "device": status["engine"]["device"],
            "rounds": len(point.passes),
            "tokens_per_s_of_rounds": point.rates(),
            "gb_per_s": _gb_per_s(point.counted, status["engine"]),
            "cached_tokens": sum(cached_tokens(one) for one in seen),
            "preemptions": sum(kind == "preempted" for one in seen for _, kind in one.moves),
        },
    }


def _gb_per_s(counted: list[_Counted], engine: Mapping[str, Any]) -> float | None:
    """None for models with sliding windows, whose layers read less than is stored."""
    seconds = sum(one.seconds for one in counted)
    if engine["sliding_windows"] or seconds <= 0:
        return None
    weights = sum(one.steps for one in counted) * engine["step_weight_bytes"]
    stored = sum(one.context_tokens for one in counted) * engine["block_bytes"] / engine["block_size"]
    return (weights + stored) / seconds / 1e9


def _ratios(formats: list[str], levels: list[int], rates: Samples) -> dict[str, Spread]:
    """KV formats to the first one, and concurrencies to the least."""
    pairs = {f"{name} to {formats[0]}, c={level}": (f"{name}, c={level}", f"{formats[0]}, c={level}")
             for name in formats[1:] for level in levels}  # fmt: skip
    for name in formats:
        for level in sorted(levels)[1:]:
            pairs[f"{name}: c={level} to c={min(levels)}"] = f"{name}, c={level}", f"{name}, c={min(levels)}"
    served = {name for name, values in rates.items() if min(values) > 0}
    return {name: ratio_of(rates, *pair) for name, pair in pairs.items() if served.issuperset(pair)}


def _errors(points: list[_Point]) -> list[str]:
    found = dict.fromkeys(seen.error for point in points for run in point.passes for seen in run.seen if seen.error)
    return list(found)[:ERRORS_SHOWN]


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(value) else value
