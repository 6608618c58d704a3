"""`deepinfer-daemon bench profile`: a decode step and a prefill chunk, operator by operator, and what lies between.

The engine is built as the daemon builds it and run without its stages. A recorded decode step is replayed with the time
of every task; it is also replayed as it is, and, through a daemon's sockets, with everything around it. All of it takes
turns.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from deepinfer.clients import Client
from deepinfer.daemon.bench.conditions import conditions, engine_facts, model_sha256
from deepinfer.daemon.bench.load import prompt_vocabulary, random_prompt, started_daemon
from deepinfer.daemon.bench.peers.config import Arm
from deepinfer.daemon.bench.peers.measure import Ours, rate_of
from deepinfer.daemon.bench.profile.account import Account
from deepinfer.daemon.bench.profile.config import DAEMON_TOKENS, ProfileBench
from deepinfer.daemon.bench.profile.measure import Passes
from deepinfer.daemon.bench.profile.report import entry, print_report
from deepinfer.daemon.bench.results import write_json
from deepinfer.daemon.bench.timing import copy_measure
from deepinfer.daemon.engine_host import EngineHost
from deepinfer.stages.model import resolve_model

COPY_BYTES = 1 << 28


def run_profile(bench: ProfileBench, output: Path | None) -> None:
    host = EngineHost(bench.engine(), lambda stage, done, total: None)
    try:
        with ExitStack() as stack:
            client = stack.enter_context(started_daemon(*bench.daemon_options())) if bench.daemon else None
            report = _measure(bench, host, client)
    finally:
        host.compute.close()
    print_report(report)
    write_json(report, output)


def _measure(bench: ProfileBench, host: EngineHost, client: Client | None) -> dict[str, Any]:
    run = host.compute.run
    passes = run(Passes, bench, host)
    copy = run(copy_measure, host.ops, COPY_BYTES)
    steps: dict[int, tuple[list[int], list[Account], list[float]]] = {rows: ([], [], []) for rows in bench.rows}
    chunks: dict[int, tuple[list[int], list[Account], list[float]]] = {rows: ([], [], []) for rows in bench.chunks}
    copies = []
    for number in range(bench.rounds):
        click.echo(f"round {number + 1} of {bench.rounds}", err=True)
        copies.append(2 * COPY_BYTES / run(copy) / 1e9)
        for rows, (plain, timed, served) in steps.items():
            plain += [run(passes.step, rows) for _ in range(bench.steps)]
            timed += [run(passes.timed_step, rows) for _ in range(bench.steps)]
            if client is not None:
                served.append(_served_step(client, bench.context, rows))
        for rows, (plain, timed, _) in chunks.items():
            plain.append(run(passes.chunk, rows))
            timed.append(run(passes.timed_chunk, rows))
    return {
        **conditions(),
        **asdict(bench),
        "model_sha256": model_sha256(resolve_model(bench.model)),
        "engine": engine_facts({"engine": host.summary()}),
        "decode_steps": "replayed" if passes.recorded else "call by call",
        "copy_gb_per_s": round(statistics.median(copies), 2),
        "decode": {str(rows): entry(*measured) for rows, measured in steps.items()},
        "prefill": {str(rows): entry(*measured) for rows, measured in chunks.items()},
    }


def _served_step(client: Client, context: int, rows: int) -> float:
    """Nanoseconds of a decode step of a daemon, by the times at which its tokens arrive."""
    vocab_size = prompt_vocabulary(client)
    prompts = [random_prompt(context, number, vocab_size) for number in range(rows)]
    extra = rows * (2 + context // 256)
    run = Ours(client).run(prompts, DAEMON_TOKENS + extra)
    return 1e9 * rows / rate_of(Arm("decode", rows, context), run)
