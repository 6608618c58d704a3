"""`start --detach`: run `start` in a session of its own and return when it is ready, or with its last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.commands import show_status
from deepinfer.daemon.log import for_people
from deepinfer.daemon.runtime_folder import CONNECTION_FILE, is_locked, make_private, remove_leftover, require_log
from deepinfer.daemon.setting import given

POLL_SECONDS = 0.05
LAST_LINES = 20


def arguments_of(flags: Mapping[str, Any]) -> list[str]:
    """The flags that were given, again: the new process finds the environment and the configuration file by itself."""
    arguments = []
    for name, value in given(dict(flags)).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments


def start_detached(flags: Mapping[str, Any], config_file: Path | None, folder: Path) -> int:
    """A new process rather than a fork: a zmq context does not survive one."""
    if is_locked(folder):
        click.echo(f"a daemon is already running in {folder}", err=True)
        return 1
    make_private(folder)
    remove_leftover(folder / CONNECTION_FILE)
    log_path = require_log(folder)
    with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "deepinfer.daemon.cli",
                "start",
                "--runtime-dir",
                str(folder),
                *arguments_of({"config": config_file, **flags}),
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
            click.echo("\n".join(map(for_people, lines)), err=True)
            if code < 0:
                click.echo(f"the daemon was killed by {signal.Signals(-code).name} before it was ready", err=True)
            return code if code > 0 else 1
        time.sleep(POLL_SECONDS)
    return show_status(folder, as_json=False)
