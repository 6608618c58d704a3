"""The `stress` commands: load and faults that must not change an answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.cli_common import EXIT_CONFIG, fail
from deepinfer.daemon.config import ConfigError
from deepinfer.daemon.options import options_of
from deepinfer.daemon.setting import given
from deepinfer.daemon.stress.cycles_config import CyclesConfig
from deepinfer.daemon.stress.kill_config import KillConfig
from deepinfer.daemon.stress.streams_config import StreamsConfig
from deepinfer.daemon.stress.swap_config import StressConfig, engine_settings

append_option = click.option("--append", is_flag=True, help="Add this run to those that --output holds.")


@click.group()
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
    from deepinfer.daemon.stress.swap import run_stress
    from deepinfer.stages.model.errors import ModelError

    try:
        sys.exit(run_stress(StressConfig(**given(options)), formats, engine_settings(settings), output))
    except (ConfigError, ModelError) as error:
        fail(str(error), EXIT_CONFIG)


@stress.command()
@options_of(KillConfig)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
@append_option
def kill(output: Path | None, append: bool, **options: Any) -> None:
    """A real daemon whose engine is killed under load, again and again: everyone must answer as if nothing had been."""
    from deepinfer.daemon.stress.daemon import DaemonFailed
    from deepinfer.daemon.stress.kill import run_kill

    try:
        sys.exit(run_kill(KillConfig(**given(options)), output, append))
    except ConfigError as error:
        fail(str(error), EXIT_CONFIG)
    except DaemonFailed as error:
        fail(str(error), 1)


@stress.command()
@options_of(CyclesConfig)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
@append_option
def cycles(output: Path | None, append: bool, **options: Any) -> None:
    """Start a real daemon and hit its front or its engine, at every moment, again and again: it ends in time, nothing
    of it is left, and the next start works."""
    from deepinfer.daemon.stress.cycles import run_cycles

    try:
        sys.exit(run_cycles(CyclesConfig(**given(options)), output, append))
    except ConfigError as error:
        fail(str(error), EXIT_CONFIG)


@stress.command()
@options_of(StreamsConfig)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def streams(output: Path | None, **options: Any) -> None:
    """A thousand streams at once on a real daemon, whose control socket must answer meanwhile; then others beside a
    client and a subscriber that never read."""
    from deepinfer.daemon.stress.daemon import DaemonFailed
    from deepinfer.daemon.stress.streams import run_streams

    try:
        sys.exit(run_streams(StreamsConfig(**given(options)), output))
    except ConfigError as error:
        fail(str(error), EXIT_CONFIG)
    except DaemonFailed as error:
        fail(str(error), 1)
