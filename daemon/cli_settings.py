"""The commands that look at settings and start nothing: `config show` and `plan`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from deepinfer.daemon.cli_common import EXIT_CONFIG, fail
from deepinfer.daemon.config import ConfigError, DaemonConfig
from deepinfer.daemon.display import wide_console
from deepinfer.daemon.options import options_of
from deepinfer.daemon.sources import gather


class ByteSize(click.ParamType):
    """4GiB, 512MiB, 3.5GB, or bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        units = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", str(value).strip().lower())
        if match is None or match[2] not in units or float(match[1]) == 0:
            self.fail(f"{value!r} is no size; write it as 4GiB, 512MiB, 3.5GB or a number of bytes", param, ctx)
        return int(float(match[1]) * units[match[2]])


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
        fail(str(error), EXIT_CONFIG)


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
    wide_console().print(table, highlight=False, markup=False)


def _shown(value: Any) -> str:
    """As it is written in the configuration file."""
    return "-" if value is None else json.dumps(value)


@click.command("plan")
@settings_options
@click.option(
    "--memory", type=ByteSize(), help="Plan for a device with so much free memory, as 4GiB. cuda needs no GPU then."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def plan_command(config_file: Path | None, memory: int | None, as_json: bool, **flags: Any) -> None:
    """What the engine would take of the memory, and how many tokens each KV format would hold.

    Reads no weights. Exit code 78 when it does not fit."""
    from deepinfer.daemon.plan_report import show_plan
    from deepinfer.kernels.devices import DeviceError
    from deepinfer.stages.model.errors import ModelError

    with config_errors():
        try:
            show_plan(gather(flags, config_file).config, memory, as_json)
        except (DeviceError, ModelError) as error:
            raise ConfigError(str(error)) from error
