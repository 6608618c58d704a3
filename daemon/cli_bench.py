"""The commands that measure: kernels against references, KV formats against one another, the daemon against limits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.bench.capacity_config import CapacityBench
from deepinfer.daemon.bench.concurrency_config import ConcurrencyBench
from deepinfer.daemon.bench.jitter_config import JitterBench
from deepinfer.daemon.bench.overhead_config import OverheadBench
from deepinfer.daemon.bench.peers.config import PeersBench, pythons_of
from deepinfer.daemon.bench.profile.config import ProfileBench
from deepinfer.daemon.bench.slope_config import SlopeBench
from deepinfer.daemon.bench.swap_config import SwapBench
from deepinfer.daemon.cli_common import EXIT_CONFIG, fail
from deepinfer.daemon.config import ConfigError
from deepinfer.daemon.options import options_of
from deepinfer.daemon.quality.config import KvQuality
from deepinfer.daemon.setting import given


@click.command("validate-kernels")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or host-emulation.")
@click.option("--checkpoint", help="Also compare the logits of one token of this model with a dense attention.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def validate_kernels(device: str, checkpoint: str | None, output: Path | None) -> None:
    """Compare every kernel of this device with a plain reference. Exit code 1 when one is outside its limits."""
    from deepinfer.daemon.validate_kernels import run_validation

    sys.exit(run_validation(device, checkpoint, output))


@click.command("kv-quality")
@options_of(KvQuality)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw quality against bytes per token.")
def kv_quality(output: Path | None, plot: Path | None, **options: Any) -> None:
    """Compare KV formats with keys and values in the compute dtype. Exit code 1 when one is outside the gate."""
    from deepinfer.kernels.openmp import limit_spinning

    limit_spinning()
    from deepinfer.daemon.quality.kv_quality import run_kv_quality
    from deepinfer.stages.model.errors import ModelError

    try:
        sys.exit(run_kv_quality(KvQuality(**given(options)), output, plot))
    except (ConfigError, ModelError) as error:
        fail(str(error), EXIT_CONFIG)


@click.group()
def bench() -> None:
    """Measure this machine. Every number in the documentation comes from one of these."""


@bench.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--threads", type=int, default=lambda: len(os.sched_getaffinity(0)), help="[default: all cores]")
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--peer/--no-peer", default=True, show_default=True, help="Measure transformers' generate beside it.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def serving(model: str, threads: int, rounds: int, peer: bool, output: Path | None) -> None:
    """Decode at several concurrencies, prefill, KV formats at long context, and a peer, in one run."""
    from deepinfer.daemon.bench.serving import run_bench

    run_bench(model, threads, rounds, peer, output)


@bench.command()
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or host-emulation.")
@click.option("--threads", type=int, default=lambda: len(os.sched_getaffinity(0)), help="[default: all cores]")
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def kernels(device: str, threads: int, rounds: int, output: Path | None) -> None:
    """Paged decode of every KV format (on a GPU the GEMV and a decode step too), beside a copy of memory."""
    from deepinfer.kernels.openmp import limit_spinning

    limit_spinning()
    from deepinfer.daemon.bench.kernels import run_bench_kernels

    run_bench_kernels(device, rounds, threads, output)


@bench.command()
@click.option(
    "--model", "models", multiple=True, help="A path or an alias; may be given again. [default: random files]"
)
@click.option("--threads", type=int, default=lambda: len(os.sched_getaffinity(0)), help="[default: all cores]")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def loading(models: tuple[str, ...], threads: int, rounds: int, output: Path | None) -> None:
    """How long files take to become weights, beside a plain read of them: of these models, or of random weights in
    every type of GGUF files."""
    from deepinfer.kernels.openmp import limit_spinning

    limit_spinning()
    from deepinfer.daemon.bench.loading import run_loading_bench
    from deepinfer.stages.model import resolve_model

    run_loading_bench([resolve_model(model) for model in models], rounds, threads, output)


@contextmanager
def config_errors() -> Iterator[None]:
    """A setting that cannot work is a sentence and exit code 78."""
    try:
        yield
    except ConfigError as error:
        fail(str(error), EXIT_CONFIG)


def result_options(plot: str | None = None) -> Callable[[Callable], Callable]:
    """`--output`, and `--plot` where there is something to draw."""

    def decorate(command: Callable) -> Callable:
        kind = click.Path(path_type=Path, dir_okay=False)
        if plot is not None:
            command = click.option("--plot", type=kind, help=plot)(command)
        return click.option("--output", type=kind, help="Write everything as JSON.")(command)

    return decorate


@bench.command("concurrency")
@options_of(ConcurrencyBench)
@result_options("Draw throughput and latencies against the concurrency.")
def bench_concurrency(output: Path | None, plot: Path | None, **options: Any) -> None:
    """Throughput and latencies of a load at several concurrencies and KV formats; JSON as `vllm bench serve` has it."""
    from deepinfer.daemon.bench.concurrency import run_concurrency_bench

    with config_errors():
        sys.exit(run_concurrency_bench(ConcurrencyBench(**given(options)), output, plot))


@bench.command("capacity")
@options_of(CapacityBench)
@result_options("Draw the tokens that each KV format holds.")
def bench_capacity(output: Path | None, plot: Path | None, **options: Any) -> None:
    """Tokens that a pool holds in each KV format, counted by filling it. Exit code 1 when the plan said more."""
    from deepinfer.daemon.bench.capacity import run_capacity_bench

    with config_errors():
        sys.exit(run_capacity_bench(CapacityBench(**given(options)), output, plot))


@bench.command("slope")
@options_of(SlopeBench)
@result_options("Draw the steps and their lines.")
def bench_slope(output: Path | None, plot: Path | None, **options: Any) -> None:
    """What a decode step costs for every token of context, and from where on one KV format is faster than another."""
    from deepinfer.daemon.bench.slope import run_slope_bench

    with config_errors():
        run_slope_bench(SlopeBench(**given(options)), output, plot)


@bench.command("jitter")
@options_of(JitterBench)
@result_options("Draw how many pauses are how long.")
def bench_jitter(output: Path | None, plot: Path | None, **options: Any) -> None:
    """How evenly tokens come, with and without requests that must swap."""
    from deepinfer.daemon.bench.jitter import run_jitter_bench

    with config_errors():
        run_jitter_bench(JitterBench(**given(options)), output, plot)


@bench.command("overhead")
@options_of(OverheadBench)
@result_options()
def bench_overhead(output: Path | None, **options: Any) -> None:
    """What front, sockets and scheduling take of a decode step, beside the same step in one process."""
    from deepinfer.kernels.openmp import limit_spinning

    limit_spinning()
    from deepinfer.daemon.bench.overhead import run_overhead_bench
    from deepinfer.stages.model.errors import ModelError

    with config_errors():
        try:
            run_overhead_bench(OverheadBench(**given(options)), output)
        except ModelError as error:
            fail(str(error), EXIT_CONFIG)


@bench.command("swap")
@options_of(SwapBench)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def bench_swap(output: Path | None, **options: Any) -> None:
    """Copies beside plain copies, those that stay beside those that swap, and eight requests over a pool for two."""
    from deepinfer.daemon.bench.swap import run_swap_bench

    try:
        settings = SwapBench(**given(options))
        settings.check()
        run_swap_bench(settings, output)
    except ConfigError as error:
        fail(str(error), EXIT_CONFIG)


@bench.command("peers")
@options_of(PeersBench)
@click.option(
    "--peer-python",
    multiple=True,
    metavar="NAME=PATH",
    help="A Python that has the peer NAME. May be given repeatedly.",
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def bench_peers(peer_python: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """Decode and prefill of other programs that serve the same file, beside ours, in one run."""
    from deepinfer.daemon.bench.peers.run import run_peers_bench

    try:
        settings = PeersBench(**given(options))
        settings.check()
        run_peers_bench(settings, pythons_of(peer_python), output)
    except ConfigError as error:
        fail(str(error), EXIT_CONFIG)


@bench.command("profile")
@options_of(ProfileBench)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def bench_profile(output: Path | None, **options: Any) -> None:
    """Where the time of a decode step and of a prefill chunk goes, operator by operator."""
    from deepinfer.kernels.openmp import limit_spinning

    limit_spinning()
    from deepinfer.daemon.bench.profile.run import run_profile
    from deepinfer.stages.model.errors import ModelError

    try:
        settings = ProfileBench(**given(options))
        settings.check()
        run_profile(settings, output)
    except (ConfigError, ModelError) as error:
        fail(str(error), EXIT_CONFIG)
