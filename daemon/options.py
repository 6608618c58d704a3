"""Command-line options generated from a configuration dataclass, so that a default is written once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import click

from deepinfer.daemon.setting import kind_of, settings_of


def options_of(config: type) -> Callable[[Callable], Callable]:
    """A decorator that adds one option per field: `--field-name`, or a flag pair for a bool, and its aliases. An option
    that was not given is None: other sources may have the setting, and the dataclass has its default."""

    def decorate(command: Callable) -> Callable:
        for name, field in reversed(settings_of(config).items()):
            command = _option(field, kind_of(config, name))(command)
        return command

    return decorate


def _option(field: dataclasses.Field, kind: type) -> Callable[[Callable], Callable]:
    flag = field.name.replace("_", "-")
    aliases, choices, help = (field.metadata[key] for key in ("aliases", "choices", "help"))
    names = (f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}", field.name, *aliases)
    if field.default is not None:
        shown = ("on" if field.default else "off") if kind is bool else field.default
        help = f"{help} [default: {shown}]"
    if kind is bool:
        return click.option(*names, default=None, help=help)
    return click.option(*names, type=click.Choice(choices) if choices else kind, default=None, help=help)
