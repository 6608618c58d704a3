"""Which addresses the daemon may listen on, and which of them need keys."""

from __future__ import annotations

from pathlib import Path

from deepinfer.daemon.runtime_folder import FolderError, require_private
from deepinfer.daemon.setting import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def check_endpoint(name: str, endpoint: str) -> None:
    """ipc in a private folder, or TCP. Raises ConfigError. One that `is_open` needs keys as well."""
    if endpoint.startswith("ipc://"):
        _check_ipc(name, endpoint)
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not (port == "*" or (port.isdigit() and 0 < int(port) < 65536)):
        raise ConfigError(
            f"{name} is {endpoint!r}; it must be ipc://PATH or tcp://127.0.0.1:PORT, with a port from 1 to 65535 or *"
        )
    if not host:
        raise ConfigError(f"{name} is {endpoint!r}; it must name an address; 0.0.0.0 is every interface")


def is_open(endpoint: str) -> bool:
    """Whether other machines may reach it."""
    return not endpoint.startswith("ipc://") and endpoint.removeprefix("tcp://").rpartition(":")[0] not in LOOPBACK


def _check_ipc(name: str, endpoint: str) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    if not path.is_absolute():
        raise ConfigError(
            f"{name} is {endpoint!r}; it must name an absolute path (abstract sockets, with @, are open to everyone)"
        )
    try:
        require_private(path.parent)
    except FolderError as error:
        raise ConfigError(f"{name} is {endpoint!r}; its folder is not private: {error}") from error
    if not path.parent.is_dir():
        raise ConfigError(f"{name} is {endpoint!r}; the folder {path.parent} does not exist")
