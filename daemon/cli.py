"""The `deepinfer-daemon` command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click

from deepinfer.daemon.bench_swap_config import SwapBench
from deepinfer.daemon.cli_keys import keys_group
from deepinfer.daemon.cli_settings import config_group, plan_command, settings_options
from deepinfer.daemon.config import ConfigError, DaemonConfig
from deepinfer.daemon.options import options_of
from deepinfer.daemon.runtime_folder import FolderError
from deepinfer.daemon.setting import given
from deepinfer.daemon.sources import gather
from deepinfer.daemon.stress_config import StressConfig, engine_settings

EXIT_CONFIG = 78

runtime_option = click.option(
    "--runtime-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="DEEPINFER_RUNTIME_DIR",
    help="Private folder of sockets, lock and connection file. [default: below XDG_RUNTIME_DIR]",
)


def where_options(command: Callable) -> Callable:
    """Which daemon: `where`, the runtime folder of one on this machine, or how to reach one elsewhere."""
    for option in (
        runtime_option,
        click.option("--connect", metavar="ENDPOINT", help="A daemon elsewhere, such as tcp://10.0.0.2:5555."),
        click.option("--server-key", help="Its public key."),
        click.option("--key-file", type=click.Path(path_type=Path), help="Our own key pair, NAME.key_secret."),
    ):
        command = option(command)

    @wraps(command)
    def with_where(
        runtime_dir: Path | None = None,
        connect: str | None = None,
        server_key: str | None = None,
        key_file: Path | None = None,
        **values: Any,
    ) -> Any:
        with folder_errors():
            if connect is None:
                return command(where=_folder(runtime_dir), **values)
            from deepinfer.clients.discovery import locate
            from deepinfer.clients.errors import DeepInferError

            try:
                return command(where=locate(connect, server_key, key_file), **values)
            except DeepInferError as error:
                _fail(str(error), EXIT_CONFIG)

    return with_where


@click.group(context_settings={"max_content_width": 110})
@click.version_option(package_name="deepinfer-daemon")
def main() -> None:
    """Serve a language model from a small machine, over ZeroMQ."""


main.add_command(config_group)
main.add_command(plan_command)
main.add_command(keys_group)


@main.command()
@settings_options
@runtime_option
@click.option("--detach", is_flag=True, help="Return when the daemon is ready; it goes on in the background.")
def start(runtime_dir: Path | None, detach: bool, config_file: Path | None, **flags: Any) -> None:
    """Run the daemon. Ends with SIGTERM, Ctrl-C or `stop`; running requests finish first."""
    from deepinfer.daemon.front import runtime_path

    folder = runtime_path(runtime_dir)
    try:
        config = gather(flags, config_file).config
        if detach:
            from deepinfer.daemon.detach import start_detached

            sys.exit(start_detached(flags, config_file, folder))
        sys.exit(_run_front(config, folder))
    except (ConfigError, FolderError) as error:
        _fail(str(error), EXIT_CONFIG)


def _run_front(config: DaemonConfig, path: Path) -> int:
    from deepinfer.daemon.display import StartDisplay
    from deepinfer.daemon.front import Front
    from deepinfer.daemon.gate import curve_of
    from deepinfer.daemon.runtime_folder import AlreadyRunning, RuntimeFolder
    from deepinfer.daemon.topology import two_processes
    from deepinfer.stages.admission import EndpointError
    from deepinfer.stages.model.errors import ModelError

    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s front %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    topology = two_processes(path, config.endpoint)
    curve = curve_of(config)
    try:
        folder = RuntimeFolder(path)
        return Front(config, folder, topology, StartDisplay(), curve).run()
    except AlreadyRunning as error:
        _fail(str(error), 1)
    except (ModelError, EndpointError) as error:
        _fail(str(error), EXIT_CONFIG)


@main.command()
@where_options
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
def status(where: Any, as_json: bool) -> None:
    """Show a running daemon. Exit code: 0 ready, 1 dead but files left, 3 not running, 4 hung."""
    from deepinfer.daemon.commands import show_status

    sys.exit(show_status(where, as_json))


@main.command()
@runtime_option
@click.option("--once", is_flag=True, help="Print one frame and end.")
def top(runtime_dir: Path | None, once: bool) -> None:
    """Watch a running daemon: requests, blocks, host memory, tokens per second. Ctrl-C ends it."""
    from deepinfer.daemon.top import show_top

    with folder_errors():
        sys.exit(show_top(_folder(runtime_dir), once))


@main.command()
@runtime_option
@click.option("--now", is_flag=True, help="Cut running requests instead of letting them finish.")
def stop(runtime_dir: Path | None, now: bool) -> None:
    """Stop a running daemon and wait until it is gone."""
    from deepinfer.daemon.commands import stop_daemon

    with folder_errors():
        code, words = stop_daemon(_folder(runtime_dir), now)
    click.echo(words)
    sys.exit(code)


def sampling_options(command: Callable) -> Callable:
    """The options of the protocol's sampling fields. What is not given is not sent, so the daemon's defaults count."""
    for option in reversed(
        [
            click.option("--max-new-tokens", type=int, help="Tokens to generate at most."),
            click.option("--temperature", type=float, help="0 is greedy."),
            click.option("--top-k", type=int),
            click.option("--top-p", type=float),
            click.option("--min-p", type=float),
            click.option("--repetition-penalty", type=float),
            click.option("--seed", type=int),
            click.option("--stop", multiple=True, help="Stop string; may be repeated."),
            click.option("--ignore-eos", is_flag=True, default=None),
        ]
    ):
        command = option(command)

    @wraps(command)
    def without_unset(**values: Any) -> Any:
        return command(**{name: value for name, value in values.items() if value not in (None, ())})

    return without_unset


@main.command()
@click.argument("prompt")
@sampling_options
@where_options
def generate(prompt: str, where: Any, **fields: Any) -> None:
    """Continue PROMPT as plain text, streamed."""
    from deepinfer.daemon.commands import stream_answer

    sys.exit(stream_answer(where, {"prompt": prompt, **_plain(fields)}))


@main.command()
@click.argument("message", required=False)
@click.option("--system", help="System message.")
@sampling_options
@where_options
def chat(where: Any, message: str | None = None, system: str | None = None, **fields: Any) -> None:
    """Talk to the model; with MESSAGE, one answer and out."""
    from deepinfer.daemon.commands import chat_loop

    sys.exit(chat_loop(where, message, system, _plain(fields)))


@main.command("validate-kernels")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or host-emulation.")
@click.option("--checkpoint", help="Also compare the logits of one token of this model with a dense attention.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def validate_kernels(device: str, checkpoint: str | None, output: Path | None) -> None:
    """Compare every kernel of this device with a plain reference. Exit code 1 when one is outside its limits."""
    from deepinfer.daemon.validate_kernels import run_validation

    sys.exit(run_validation(device, checkpoint, output))


@main.group()
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
    from deepinfer.daemon.bench_serving import run_bench

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
    from deepinfer.daemon.bench_kernels import run_bench_kernels

    run_bench_kernels(device, rounds, threads, output)


@bench.command("swap")
@options_of(SwapBench)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def bench_swap(output: Path | None, **options: Any) -> None:
    """Copies beside plain copies, those that stay beside those that swap, and eight requests over a pool for two."""
    from deepinfer.daemon.bench_swap import run_swap_bench

    try:
        settings = SwapBench(**given(options))
        settings.check()
        run_swap_bench(settings, output)
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)


@main.group()
def stress() -> None:
    """Load that must not change an answer. Exit code 1 when a check failed."""


@stress.command()
@options_of(StressConfig)
@click.option(
    "--kv-cache-dtype", "formats", multiple=True, default=["auto"], show_default=True, help="May be repeated."
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another setting of the engine.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def swap(formats: tuple[str, ...], settings: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """More requests than the KV pool holds, faults, cancels: everyone must answer as if alone, and nothing be left."""
    from deepinfer.daemon.stress import run_stress
    from deepinfer.stages.model.errors import ModelError

    try:
        sys.exit(run_stress(StressConfig(**given(options)), formats, engine_settings(settings), output))
    except (ConfigError, ModelError) as error:
        _fail(str(error), EXIT_CONFIG)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _folder(runtime_dir: Path | None) -> Path:
    from deepinfer.daemon.front import runtime_path

    return runtime_path(runtime_dir)


@contextmanager
def folder_errors() -> Iterator[None]:
    """A runtime folder that is not ours is a sentence, not a traceback."""
    try:
        yield
    except FolderError as error:
        _fail(str(error), EXIT_CONFIG)


def _fail(message: str, code: int) -> NoReturn:
    click.secho(f"error: {message}", err=True, fg="red")
    sys.exit(code)


if __name__ == "__main__":
    main()
