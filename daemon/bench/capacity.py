"""`deepinfer-daemon bench capacity`: the tokens that a KV pool holds, counted in live requests of a real daemon.

For each KV format `deepinfer-daemon plan` is asked what it promises, then a daemon is started with the same settings
and without any way to make room. Requests fill its pool until the first one ends because there is no block left.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from deepinfer.clients import Client
from deepinfer.daemon.bench.capacity_config import CapacityBench
from deepinfer.daemon.bench.conditions import conditions, engine_facts, served_sha256
from deepinfer.daemon.bench.load import Seen, Streams, random_prompt, started_daemon
from deepinfer.daemon.bench.results import check_plot, save_figure, write_json

NO_ROOM_TO_MAKE = ("--no-cpu-offload", "--preemption", "swap-only", "--no-prefix-cache")
GROWTH_BLOCKS = 2
"""That each request grows into: the rest is its prompt."""
DEFINITIONS = {
    "promised_tokens": "token_capacity of `deepinfer-daemon plan` with the settings of the daemon",
    "held_tokens": "tokens whose keys and values all live requests had stored when the first one ended for lack of a "
    "block, as their client counts them: prompt and answer, without the token that was told last",
}


def run_capacity_bench(bench: CapacityBench, output: Path | None, plot: Path | None) -> int:
    """Prints a table; returns the exit code: 1 where a promise was not kept. Raises ConfigError."""
    bench.check()
    check_plot(plot)
    formats: dict[str, dict[str, Any]] = {}
    sha256 = None
    for name in bench.formats:
        click.echo(f"{name}", err=True)
        planned = _planned(bench, name)
        options = [*bench.options(name), *NO_ROOM_TO_MAKE]
        if bench.pool_mb:
            options += ["--num-blocks", str(planned["num_blocks"])]
        with started_daemon(*options) as client:
            status = client.status()
            sha256 = sha256 or served_sha256(client, status)
            formats[name] = _filled(client, status, bench.requests) | {"promised_tokens": planned["token_capacity"]}
    first = formats[bench.formats[0]]["held_tokens"]
    for row in formats.values():
        row["of_promised"] = row["held_tokens"] / row["promised_tokens"]
        row["to_first"] = row["held_tokens"] / first
        row["kept"] = row["held_tokens"] >= row["promised_tokens"]
    report = {
        **conditions(),
        "model": bench.model,
        "model_sha256": sha256,
        "settings": asdict(bench),
        "definitions": DEFINITIONS,
        "formats": formats,
    }
    _print(report)
    write_json(report, output)
    if plot is not None:
        _draw(report, plot)
    return 0 if all(row["kept"] for row in formats.values()) else 1


def _planned(bench: CapacityBench, name: str) -> dict[str, Any]:
    """What the planner says, in a process of its own, so that no device memory is in use when the daemon starts."""
    options = [*bench.options(name), *NO_ROOM_TO_MAKE]
    if not bench.pool_mb:
        return _plan(options)
    block_bytes = _plan([*options, "--num-blocks", "1"])["block_bytes"]
    blocks = (bench.pool_mb << 20) // block_bytes
    if blocks < 1 + GROWTH_BLOCKS:
        raise click.ClickException(
            f"pool_mb is {bench.pool_mb}; with KV {name} a block of this model has {block_bytes:,} bytes, and at least "
            f"{1 + GROWTH_BLOCKS} are needed"
        )
    return _plan([*options, "--num-blocks", str(blocks)])


def _plan(options: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "deepinfer.daemon.cli", "plan", "--json", *options]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        raise click.ClickException(told.stderr.strip())
    return json.loads(told.stdout)


def _filled(client: Client, status: Mapping[str, Any], least: int) -> dict[str, Any]:
    """Fills the pool and empties it again."""
    engine = status["engine"]
    blocks, size, longest = engine["num_blocks"], engine["block_size"], min(engine["context"], engine["token_capacity"])
    count = number_of_requests(blocks, size, longest, least)
    prompt = (blocks // count - GROWTH_BLOCKS) * size
    vocab_size = int(status["limits"]["vocab_size"])
    with Streams(client) as streams:
        for number in range(count):
            streams.send(random_prompt(prompt, number, vocab_size), longest - prompt)
        streams.until(lambda: any(seen.over for seen in streams.seen))
        held, live = sum(stored(seen, prompt) for seen in streams.seen), [s for s in streams.seen if not s.over]
        reason = next(seen.done["finish_reason"] for seen in streams.seen if seen.done)
        for seen in live:
            streams.cancel(seen)
        streams.until_all_done()
    return {
        "engine": engine_facts(dict(status)),
        "bytes_per_token": engine["block_bytes"] / size,
        "pool_bytes": engine["pool_bytes"],
        "allocated_tokens": engine["token_capacity"],
        "held_tokens": held,
        "requests": count,
        "first_end": reason,
    }


def number_of_requests(blocks: int, size: int, longest: int, least: int) -> int:
    """As many as are asked for, more where that many do not fill the pool at three quarters of the longest, fewer where
    a prompt and room to grow would not fit for each. Requests do not begin at one moment: one that is well ahead of the
    others must not end before the pool is full."""
    filling = -(-blocks * size // max(size, 3 * longest // 4))
    return max(1, min(max(least, filling), blocks // (1 + GROWTH_BLOCKS)))


def stored(seen: Seen, prompt: int) -> int:
    """The newest token is not stored before the next step; a request without a token may be waiting for blocks."""
    return prompt + len(seen.tokens) - 1 if seen.tokens else 0


def _print(report: Mapping[str, Any]) -> None:
    row = "{:20} {:>11} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}"
    click.echo(f"{report['machine']['cpu']}; {report['model']}")
    click.echo(row.format("KV format", "bytes/token", "pool MiB", "promised", "allocated", "held", "of it", "to first"))
    for name, found in report["formats"].items():
        click.echo(
            row.format(
                name,
                f"{found['bytes_per_token']:,.0f}",
                f"{found['pool_bytes'] / 2**20:.1f}",
                *(f"{found[key]:,}" for key in ("promised_tokens", "allocated_tokens", "held_tokens")),
                f"{found['of_promised']:.1%}",
                f"{found['to_first']:.2f} x",
            )
        )
    for name, found in report["formats"].items():
        if not found["kept"]:
            missing = found["promised_tokens"] - found["held_tokens"]
            click.secho(f"{name}: {missing:,} tokens fewer than promised; {found['first_end']} ended it", fg="red")


def _draw(report: Mapping[str, Any], plot: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    names = list(report["formats"])
    bars = axes.barh(names, [found["held_tokens"] for found in report["formats"].values()])
    axes.bar_label(bars, [f"{found['to_first']:.2f} x" for found in report["formats"].values()], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("tokens held by live requests")
    axes.set_title(
        f"{report['model']}, pools of {next(iter(report['formats'].values()))['pool_bytes'] / 2**20:.0f} MiB"
    )
    save_figure(figure, plot)
