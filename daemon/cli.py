"""The `deepinfer-daemon` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.cli_common import EXIT_CONFIG, fail, folder_errors, folder_of, runtime_option, where_options
from deepinfer.daemon.cli_keys import keys_group
from deepinfer.daemon.cli_lazy import LazyGroup
from deepinfer.daemon.cli_models import models, pull, quantize
from deepinfer.daemon.cli_operate import dump, logs, reload
from deepinfer.daemon.cli_settings import config_group, plan_command, settings_options
from deepinfer.daemon.config import ConfigError, DaemonConfig
from deepinfer.daemon.runtime_folder import FolderError
from deepinfer.daemon.sources import gather
from deepinfer.daemon.topology import Topology, two_processes

_MEASURING = "deepinfer.daemon.cli_bench"
_ELSEWHERE = {
    "bench": (_MEASURING, "bench"),
    "kv-quality": (_MEASURING, "kv_quality"),
    "stress": ("deepinfer.daemon.cli_stress", "stress"),
    "validate-kernels": (_MEASURING, "validate_kernels"),
}


@click.group(cls=LazyGroup, elsewhere=_ELSEWHERE, context_settings={"max_content_width": 110})
@click.version_option(package_name="deepinfer-daemon")
def main() -> None:
    """Serve a language model from a small machine, over ZeroMQ."""


main.add_command(config_group)
main.add_command(plan_command)
main.add_command(keys_group)
for operation in (reload, logs, dump, pull, models, quantize):
    main.add_command(operation)


@main.command()
@settings_options
@runtime_option
@click.option("--detach", is_flag=True, help="Return when the daemon is ready; it goes on in the background.")
def start(runtime_dir: Path | None, detach: bool, config_file: Path | None, **flags: Any) -> None:
    """Run the daemon. Ends with SIGTERM, Ctrl-C or `stop`; running requests finish first."""
    from deepinfer.daemon.front import runtime_path

    folder = runtime_path(runtime_dir)
    try:
        read = partial(read_config, flags, config_file)
        config = read()
        topology = two_processes(folder, config.endpoint)
        if detach:
            from deepinfer.daemon.detach import start_detached

            sys.exit(start_detached(flags, config_file, folder))
        sys.exit(_run_front(config, folder, topology, read))
    except (ConfigError, FolderError) as error:
        fail(str(error), EXIT_CONFIG)


def read_config(flags: dict[str, Any], config_file: Path | None) -> DaemonConfig:
    return gather(flags, config_file).config


def _run_front(config: DaemonConfig, path: Path, topology: Topology, read: Callable[[], DaemonConfig]) -> int:
    from deepinfer.daemon.display import StartDisplay
    from deepinfer.daemon.front import Front
    from deepinfer.daemon.gate import curve_of
    from deepinfer.daemon.log import configure_logging
    from deepinfer.daemon.runtime_folder import AlreadyRunning, RuntimeFolder
    from deepinfer.stages.admission import EndpointError
    from deepinfer.stages.model.errors import ModelError

    os.umask(0o077)
    configure_logging("front", config.log_level, config.log_format)
    curve = curve_of(config)
    try:
        folder = RuntimeFolder(path)
        with ExitStack() as undo:
            undo.callback(folder.release)
            front = Front(config, folder, topology, StartDisplay(), curve, read)
            undo.pop_all()
        return front.run()
    except AlreadyRunning as error:
        fail(str(error), 1)
    except (ModelError, EndpointError) as error:
        fail(str(error), EXIT_CONFIG)


@main.command()
@where_options
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@click.option(
    "--wait", type=click.IntRange(0), metavar="SECONDS", help="First wait until it is ready, at most so long."
)
def status(where: Any, as_json: bool, wait: int | None) -> None:
    """Show a running daemon. Exit code: 0 ready, 1 dead but files left, 3 not running or not ready yet, 4 hung."""
    from deepinfer.daemon.commands import show_status

    sys.exit(show_status(where, as_json, wait))


@main.command()
@where_options
@click.option("--once", is_flag=True, help="Print one frame and end.")
def top(where: Any, once: bool) -> None:
    """Watch a running daemon: requests, blocks, host memory, tokens per second. Ctrl-C ends it. With --connect, give
    its metrics_endpoint."""
    from deepinfer.daemon.top import show_top

    sys.exit(show_top(where, once))


@main.command()
@runtime_option
@click.option("--now", is_flag=True, help="Cut running requests instead of letting them finish.")
@click.option("--drain", type=click.IntRange(0), metavar="SECONDS", help="How long they get. [default: drain_s]")
def stop(runtime_dir: Path | None, now: bool, drain: int | None) -> None:
    """Stop a running daemon and wait until it is gone."""
    from deepinfer.daemon.commands import stop_daemon

    if now and drain is not None:
        raise click.UsageError("--now and --drain exclude each other")
    with folder_errors():
        code, words = stop_daemon(folder_of(runtime_dir), now, drain)
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
            click.option("--presence-penalty", type=float),
            click.option("--frequency-penalty", type=float),
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
@click.argument("prompt", required=False)
@click.option("--n", type=click.IntRange(1), help="Answers, each with a seed of its own.")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON, when it is complete.")
@sampling_options
@where_options
def generate(where: Any, prompt: str | None = None, as_json: bool = False, **fields: Any) -> None:
    """Continue PROMPT as plain text, streamed. Without PROMPT, or with -, it is read from standard input."""
    from deepinfer.daemon.talk import prompt_of, stream_answer

    sys.exit(stream_answer(where, {"prompt": prompt_of(prompt), **_plain(fields)}, as_json))


@main.command()
@click.argument("message", required=False)
@click.option("--system", help="System message.")
@sampling_options
@where_options
def chat(where: Any, message: str | None = None, system: str | None = None, **fields: Any) -> None:
    """Talk to the model; with MESSAGE, one answer and out. /help inside lists what there is besides."""
    from deepinfer.daemon.talk import chat_loop

    sys.exit(chat_loop(where, message, system, _plain(fields)))


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


if __name__ == "__main__":
    main()
