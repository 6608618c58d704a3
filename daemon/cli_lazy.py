"""Commands whose modules are imported when they are called, and when all are listed."""

from __future__ import annotations

import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    """`elsewhere`: name of a command to module and attribute. Those modules would double the time in which the other
    commands begin."""

    def __init__(self, *arguments: Any, elsewhere: dict[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._elsewhere = elsewhere

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._elsewhere])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._elsewhere:
            return super().get_command(ctx, cmd_name)
        module, attribute = self._elsewhere[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command
