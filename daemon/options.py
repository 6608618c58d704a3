"""Command-line options generated from a configuration dataclass, so that a default is written once."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import click

ENV_PREFIX = "DEEPINFER"


def options_of(config: type) -> Callable[[Callable], Callable]:
    """A decorator that adds one option per field: `--field-name`, or a flag pair for a bool. Each can
    also be set by the environment variable DEEPINFER_FIELD_NAME."""

    def decorate(command: Callable) -> Callable:
        hints = typing.get_type_hints(config)
        for field in reversed(dataclasses.fields(config)):
            command = _option(field, hints[field.name])(command)
        return command

    return decorate


def _option(field: dataclasses.Field, hint: Any) -> Callable[[Callable], Callable]:
    flag = "--" + field.name.replace("_", "-")
    common: dict[str, Any] = {
        "default": field.default,
        "show_default": field.default is not None,
        "help": field.metadata["help"],
        "envvar": f"{ENV_PREFIX}_{field.name.upper()}",
    }
    if hint is bool:
        return click.option(f"{flag}/--no-{flag.removeprefix('--')}", **common)
    choices = field.metadata["choices"]
    return click.option(flag, type=click.Choice(choices) if choices else _plain(hint), **common)


def _plain(hint: Any) -> type:
    """int for int and for `int | None`."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
