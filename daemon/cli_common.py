"""What commands share: which daemon is meant, and errors that are a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click

from deepinfer.daemon.runtime_folder import FolderError

EXIT_CONFIG = 78

runtime_option = click.option(
    "--runtime-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="DEEPINFER_RUNTIME_DIR",
    help="Private folder of sockets, lock and connection file. [default: below XDG_RUNTIME_DIR]",
)


def where_options(command: Callable) -> Callable:
    """Which daemon: `where`, the runtime folder of one on this machine, or how to reach one elsewhere."""
    for option in (
        runtime_option,
        click.option("--connect", metavar="ENDPOINT", help="A daemon elsewhere, such as tcp://10.0.0.2:5555."),
        click.option("--server-key", help="Its public key."),
        click.option("--key-file", type=click.Path(path_type=Path), help="Our own key pair, NAME.key_secret."),
    ):
        command = option(command)

    @wraps(command)
    def with_where(
        runtime_dir: Path | None = None,
        connect: str | None = None,
        server_key: str | None = None,
        key_file: Path | None = None,
        **values: Any,
    ) -> Any:
        with folder_errors():
            if connect is None:
                return command(where=folder_of(runtime_dir), **values)
            from deepinfer.clients.discovery import locate
            from deepinfer.clients.errors import DeepInferError

            try:
                return command(where=locate(connect, server_key, key_file), **values)
            except DeepInferError as error:
                fail(str(error), EXIT_CONFIG)

    return with_where


def folder_of(runtime_dir: Path | None) -> Path:
    """The runtime folder that was asked for, else the usual one."""
    from deepinfer.daemon.front import runtime_path

    return runtime_path(runtime_dir)


@contextmanager
def folder_errors() -> Iterator[None]:
    """A runtime folder that is not ours is a sentence, not a traceback."""
    try:
        yield
    except FolderError as error:
        fail(str(error), EXIT_CONFIG)


def fail(message: str, code: int) -> NoReturn:
    click.secho(f"error: {message}", err=True, fg="red")
    sys.exit(code)
