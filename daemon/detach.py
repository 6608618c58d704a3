"""`start --detach`: run `start` in a session of its own and return when it is ready, or with its last words."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import click

from deepinfer.daemon.config import DaemonConfig
from deepinfer.daemon.runtime_folder import CONNECTION_FILE, LOG_FILE, is_locked, make_private

POLL_SECONDS = 0.05
LAST_LINES = 20


def arguments_of(config: DaemonConfig) -> list[str]:
    """The command line that gives `config` again."""
    arguments = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            arguments += [f"--{name}", str(value)]
    return arguments


def start_detached(config: DaemonConfig, folder: Path) -> int:
    """A new process rather than a fork: a zmq context does not survive one."""
    if is_locked(folder):
        click.echo(f"a daemon is already running in {folder}", err=True)
        return 1
    make_private(folder)
    (folder / CONNECTION_FILE).unlink(missing_ok=True)
    log_path = folder / LOG_FILE
    with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "deepinfer.daemon.cli",
                "start",
                "--runtime-dir",
                str(folder),
                *arguments_of(config),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while not (folder / CONNECTION_FILE).exists():
        code = process.poll()
        if code is not None:
            lines = log_path.read_text(errors="replace").splitlines()[-LAST_LINES:]
            click.echo("\n".join(lines), err=True)
            return code or 1
        time.sleep(POLL_SECONDS)
    click.echo(log_path.read_text(errors="replace").rstrip())
    return 0
