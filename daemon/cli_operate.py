"""The commands of an operator besides start, status and stop: reload, logs, dump."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.cli_common import folder_errors, folder_of, runtime_option, where_options
from deepinfer.daemon.log import for_people
from deepinfer.daemon.runtime_folder import is_locked, require_log

FOLLOW_SECONDS = 0.2


def ask(where: Any, op: str) -> dict[str, Any]:
    """One operation on the control socket; ends the command when nobody answers or it is refused."""
    from deepinfer.daemon.commands import NoDaemon, control

    try:
        return control(where, op)
    except NoDaemon as error:
        click.secho(f"error: {error}", err=True, fg="red")
        sys.exit(error.code)


@click.command()
@where_options
def reload(where: Any) -> None:
    """Read the settings and the list of allowed clients again. Says what has changed and what needs a restart."""
    report = ask(where, "reload")
    for name, value in report["changed"].items():
        click.echo(f"{name} is now {value}")
    for name in report["needs_restart"]:
        click.echo(f"{name} has changed, which needs a restart")
    if report["allowed_clients"] is not None:
        click.echo(f"{report['allowed_clients']} clients are allowed")
    if not report["changed"] and not report["needs_restart"]:
        click.echo("no setting has changed")


@click.command()
@where_options
def dump(where: Any) -> None:
    """What every thread of the daemon is doing. The engine's own stacks go to the log."""
    report = ask(where, "dump")
    click.echo(report["front"])
    click.echo(f"the stacks of the engine (process {report['engine_pid']}) are in the log")


@click.command()
@runtime_option
@click.option("--follow", "-f", is_flag=True, help="Go on until the daemon ends.")
@click.option("--lines", "-n", type=click.IntRange(0), default=100, show_default=True, help="Lines to begin with.")
@click.option("--raw", is_flag=True, help="JSON lines as they are.")
def logs(runtime_dir: Path | None, follow: bool, lines: int, raw: bool) -> None:
    """Show the log of a daemon that was started with --detach. Others log to their terminal or service manager."""
    with folder_errors():
        folder = folder_of(runtime_dir)
        alive = is_locked(folder)
        path = require_log(folder)
    if not path.exists():
        hint = "; it logs to its terminal or service manager" if alive else ""
        click.secho(f"error: there is no log in {folder}{hint}", err=True, fg="red")
        sys.exit(3)
    with path.open(encoding="utf-8", errors="replace") as file:
        shown = file.readlines()
        for line in shown[len(shown) - lines :] if lines else []:
            _show(line, raw)
        while follow and alive:
            alive = is_locked(folder)
            for line in file.readlines():
                _show(line, raw)
            time.sleep(FOLLOW_SECONDS)


def _show(line: str, raw: bool) -> None:
    line = line.rstrip("\n")
    click.echo(line if raw else for_people(line))
