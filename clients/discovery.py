"""Where a daemon keeps its runtime folder, and what its connection file says.

The daemon uses the same functions, so both sides look in the same place.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer.clients.errors import NoDaemonError
from deepinfer.clients.keys import read_keys

APPLICATION = "deepinfer-daemon"
CONNECTION_FILE = "daemon.json"
RUNTIME_VARIABLE = "DEEPINFER_RUNTIME_DIR"
DEFAULT_MAX_FRAME_BYTES = 8 * 1024 * 1024


class Connection(NamedTuple):
    """What a client needs to know of a daemon. Only `endpoint` is known when it was given by hand."""

    endpoint: str
    control_endpoint: str | None = None
    metrics_endpoint: str | None = None
    instance: str | None = None
    pid: int | None = None
    protocol: int = 1
    model: str | None = None
    limits: Mapping[str, Any] = {}
    curve: Mapping[str, str] | None = None
    """`server_key`, `public_key` and `secret_key` as Z85 text, where the connection is encrypted."""

    @property
    def max_frame_bytes(self) -> int:
        return int(self.limits.get("max_frame_bytes", DEFAULT_MAX_FRAME_BYTES))


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """DEEPINFER_RUNTIME_DIR, else the service manager's RUNTIME_DIRECTORY, else a folder of this user.

    That is `deepinfer-daemon` in XDG_RUNTIME_DIR, or where the platform has none, in LOCALAPPDATA (Windows)
    or the temporary folder with the user's number in its name.
    """
    if environ.get(RUNTIME_VARIABLE):
        return Path(environ[RUNTIME_VARIABLE])
    if environ.get("RUNTIME_DIRECTORY"):
        return Path(environ["RUNTIME_DIRECTORY"].split(":")[0])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / APPLICATION
    if sys.platform == "win32":
        return Path(environ.get("LOCALAPPDATA", tempfile.gettempdir())) / APPLICATION
    return Path(tempfile.gettempdir()) / f"{APPLICATION}-{os.getuid()}"


def locate(
    where: str | os.PathLike[str] | Connection | None = None,
    server_key: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
) -> Connection:
    """From an endpoint (`ipc://...`), a connection file, a runtime folder, or None for the default folder.

    `server_key` is the daemon's public key, and `key_file` this client's own secret one; a connection file has both,
    but for clients of other machines. Raises NoDaemonError when there is no connection file, when it is no such file,
    or another user's, and InvalidRequestError for keys that cannot be used.
    """
    connection = _locate(where)
    if server_key is None and key_file is None:
        return connection
    return connection._replace(curve=read_keys(server_key, key_file))


def _locate(where: str | os.PathLike[str] | Connection | None) -> Connection:
    if isinstance(where, Connection):
        return where
    if isinstance(where, str) and "://" in where:
        return Connection(where)
    path = Path(where) if where is not None else runtime_dir()
    return read_connection(path / CONNECTION_FILE if path.is_dir() or where is None else path)


def read_connection(path: Path) -> Connection:
    try:
        with path.open(encoding="utf-8") as file:
            _refuse_strangers(path, os.fstat(file.fileno()))
            content = json.load(file)
    except FileNotFoundError:
        raise NoDaemonError(f"no daemon is running: there is no connection file {path}") from None
    except (OSError, ValueError) as error:
        raise NoDaemonError(f"the connection file {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("endpoint"), str):
        raise NoDaemonError(f"{path} is not a connection file: it names no endpoint")
    return Connection(**{name: content[name] for name in Connection._fields if name in content})


def _refuse_strangers(path: Path, status: os.stat_result) -> None:
    """Prompts must not go to whoever could write a file into a shared temporary folder."""
    if sys.platform != "win32" and status.st_uid not in (os.getuid(), 0):
        raise NoDaemonError(f"the connection file {path} belongs to another user ({status.st_uid})")
