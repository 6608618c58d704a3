"""The private folder of one running daemon: its lock, its sockets, its connection file, its log."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

CONNECTION_FILE = "daemon.json"
LOCK_FILE = "daemon.lock"
LOG_FILE = "daemon.log"


class AlreadyRunning(RuntimeError):
    """Another daemon holds the lock of this runtime folder."""


class RuntimeFolder:
    """Held for the life of a daemon. The lock, not a socket, makes it the only one: a second bind on an ipc path
    succeeds and steals the clients of the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(
                f"runtime_dir: {path} must belong to this user and be closed to others (mode 0700); it has mode "
                f"{status.st_mode & 0o777:04o} and owner {status.st_uid}"
            )
        self._lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise AlreadyRunning(f"a daemon is already running in {path}") from None
        self._clear_leftovers()

    def _clear_leftovers(self) -> None:
        """Files of a daemon that died: we hold the lock, so nobody uses them."""
        (self.path / CONNECTION_FILE).unlink(missing_ok=True)
        for socket in self.path.glob("*.sock"):
            socket.unlink(missing_ok=True)

    def publish(self, connection: dict[str, Any]) -> Path:
        """Write the connection file, all of it or nothing of it. To be done when everything is ready, not before."""
        target = self.path / CONNECTION_FILE
        temporary = target.with_suffix(".tmp")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(connection, file, indent=1)
        temporary.replace(target)
        return target

    def release(self) -> None:
        """Take everything back but the log; the lock goes last."""
        self._clear_leftovers()
        (self.path / LOCK_FILE).unlink(missing_ok=True)
        os.close(self._lock)


def is_locked(path: Path) -> bool:
    """Whether a daemon is alive in this folder."""
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
