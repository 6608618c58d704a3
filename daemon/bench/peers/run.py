"""`deepinfer-daemon bench peers`: the same file, prompts, lengths and cores for the daemon and for everybody else here.

Everybody is a process of its own and is measured in turns, round after round; a ratio is the median of the rounds'
ratios. The daemon is driven over its socket. Whoever cannot be measured is named with the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from deepinfer.clients import Client
from deepinfer.daemon.bench.conditions import conditions, engine_facts, model_sha256
from deepinfer.daemon.bench.load import prompt_vocabulary, started_daemon
from deepinfer.daemon.bench.peers import report
from deepinfer.daemon.bench.peers.config import PeersBench
from deepinfer.daemon.bench.peers.measure import OURS, Measured, Member, Ours, measure
from deepinfer.daemon.bench.peers.process import PeerFailed
from deepinfer.daemon.bench.peers.roster import start_peer
from deepinfer.daemon.bench.results import write_json
from deepinfer.daemon.bench.rounds import noise
from deepinfer.stages.model import resolve_model


def run_peers_bench(bench: PeersBench, pythons: Mapping[str, str], output: Path | None) -> None:
    """`pythons`: of the peers that have one of their own."""
    with ExitStack() as stack:
        stack.enter_context(_kept_to_cores(bench.num_threads))
        result = _measure(stack, bench, pythons)
    report.print_report(result)
    write_json(result, output)


@contextmanager
def _kept_to_cores(count: int) -> Iterator[None]:
    """This process and all that it starts: nobody has a core for helpers that the others do not have."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _measure(stack: ExitStack, bench: PeersBench, pythons: Mapping[str, str]) -> dict[str, Any]:
    client = stack.enter_context(started_daemon(*_daemon_options(bench)))
    status = client.status()
    members, fairness = {OURS: Member(Ours(client), False)}, {OURS: _our_facts(client, bench)}
    absent = {}
    sizes = {"streams": bench.most_streams, "tokens": bench.most_tokens}
    options = {"model": str(resolve_model(bench.model)), "threads": bench.num_threads, **sizes}
    for peer in bench.roster():
        try:
            process = stack.enter_context(
                start_peer(peer, pythons.get(peer.name, sys.executable), options, bench.answer_seconds)
            )
        except PeerFailed as error:
            absent[peer.name] = str(error)
            _say(f"{peer.name} is not measured: {error}")
            continue
        members[peer.name] = Member(process, process.facts["starts_together"])
        fairness[peer.name] = process.facts
        _say(f"{peer.name} is ready")
    vocab_size = prompt_vocabulary(client)
    measured = measure(bench, members, vocab_size, _say)
    return {
        **conditions(),
        **asdict(bench),
        "threads": bench.num_threads,
        "model_sha256": model_sha256(resolve_model(bench.model)),
        "engine": engine_facts(client.status()),
        "fairness": fairness,
        **_figures(bench, measured, status["engine"]["step_weight_bytes"]),
        "not_measured": {**absent, **measured.failed},
    }


def _figures(bench: PeersBench, measured: Measured, step_bytes: int) -> dict[str, Any]:
    rates, ratios = report.medians(measured.rates), report.ratios(measured.rates)
    of_best = report.best(ratios)
    read = {
        arm.name: round(rates[arm.name][OURS].median / arm.streams * step_bytes / 1e9, 2)
        for arm in bench.arms()
        if arm.kind == "decode"
    }
    return {
        "tokens_per_s": report.as_json(rates, 2),
        "weights_gb_per_s": read,
        "ratios": report.as_json(ratios, 3),
        "best_peer": of_best,
        "goals": [goal.as_json() for goal in report.goals(bench.arms(), of_best)],
        "too_noisy": noise(report.flat(ratios), bench.rounds),
        "first_tokens_as_ours": _agreement(measured.first),
        "samples_tokens_per_s": measured.rates,
    }


def _agreement(first: Mapping[str, list[int]]) -> dict[str, dict[str, int]]:
    """How many of the prompts everybody continues with the token that we continue them with. It shows that a peer runs
    the same model; random prompts have close calls, and everybody rounds differently."""
    ours = first[OURS]
    return {
        name: {"same": sum(a == b for a, b in zip(ours, theirs, strict=False)), "prompts": min(len(ours), len(theirs))}
        for name, theirs in first.items()
        if name != OURS
    }


def _daemon_options(bench: PeersBench) -> list[str]:
    """The pool holds every stream of the largest arm."""
    tokens = bench.most_streams * (bench.most_tokens + 16)
    return [
        *("--model", bench.model, "--threads", str(bench.num_threads), "--kv-cache-dtype", bench.kv_cache_dtype),
        *("--max-cache", str(tokens), "--max-running", str(max(64, bench.most_streams)), "--no-prefix-cache"),
        *("--w4-activations", bench.w4_activations),
        *(["--batch-invariant"] if bench.batch_invariant else []),
    ]


def _our_facts(client: Client, bench: PeersBench) -> dict[str, Any]:
    engine = client.status()["engine"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in engine["linears"].items())
    return {
        "version": conditions()["versions"]["deepinfer-daemon"],
        "weights": f"{kinds}; head {engine['head']}",
        "activations": engine["compute_dtype"] if bench.w4_activations == "auto" else bench.w4_activations,
        "kv_cache": engine["kv_cache_dtype"],
        "threads": engine["threads"],
        "starts_together": False,
    }


def _say(line: str) -> None:
    click.echo(line, err=True)
