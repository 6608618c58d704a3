"""The commands that look at settings and start nothing: `config show`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from deepinfer.daemon.config import ConfigError, DaemonConfig
from deepinfer.daemon.options import options_of
from deepinfer.daemon.sources import gather

EXIT_CONFIG = 78


def settings_options(command: Callable) -> Callable:
    """All settings as flags, and the file that has the rest."""
    config = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file of settings. [default: config.toml in the user's configuration folder, if it is there]",
    )
    return options_of(DaemonConfig)(config(command))


@contextmanager
def config_errors() -> Iterator[None]:
    """A setting that cannot work is a sentence and code 78, not a traceback."""
    try:
        yield
    except ConfigError as error:
        click.secho(f"error: {error}", err=True, fg="red")
        sys.exit(EXIT_CONFIG)


@click.group("config")
def config_group() -> None:
    """Look at the settings."""


@config_group.command()
@settings_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def show(config_file: Path | None, as_json: bool, **flags: Any) -> None:
    """Every setting, its value, and where that comes from: flags, environment, file or default, in this order."""
    with config_errors():
        config, sources = gather(flags, config_file)
    values = dataclasses.asdict(config)
    if as_json:
        click.echo(json.dumps({name: {"value": values[name], "source": sources[name]} for name in values}, indent=1))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("setting", "value", "source"):
        table.add_column(heading)
    for name, value in values.items():
        table.add_row(name, _shown(value), sources[name])
    Console().print(table, highlight=False, markup=False)


def _shown(value: Any) -> str:
    """As it is written in the configuration file."""
    return "-" if value is None else json.dumps(value)
