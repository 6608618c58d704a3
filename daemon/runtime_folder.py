"""The private folder of one running daemon: its lock, its sockets, its connection file, its log."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

CONNECTION_FILE = "daemon.json"
TEMPORARY_FILE = "daemon.tmp"
"""The connection file while it is written."""
LOCK_FILE = "daemon.lock"
LOG_FILE = "daemon.log"
LOCK_PATIENCE_SECONDS = 0.5
"""Somebody who asks for the status holds the lock for a moment; a daemon holds it for longer than this."""


class AlreadyRunning(RuntimeError):
    """Another daemon holds the lock of this runtime folder."""


class FolderError(RuntimeError):
    """The runtime folder cannot be used, and why."""


def require_private(path: Path, name: str = "runtime_dir") -> None:
    """Raises FolderError unless `path` is a real folder of this user that is closed to all others.

    `name` is that of the setting to blame.

    The default folder may lie in a place where anybody can create one, so this comes before anything is read from it or
    written to it.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise FolderError(f"{name}: {path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise FolderError(f"{name}: {path} is not a folder (or a link to one, which is not followed)")
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FolderError(
            f"{name}: {path} must belong to this user and be closed to others (mode 0700); it has mode "
            f"{status.st_mode & 0o777:04o} and owner {status.st_uid}"
        )


def make_private(path: Path, name: str = "runtime_dir") -> None:
    """Raises FolderError, as `require_private` does, and when the folder cannot be made."""
    require_private(path, name)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{name}: {path} cannot be made: {error.strerror}") from error
    require_private(path, name)


def require_log(folder: Path) -> Path:
    """Where the log is or will be. Raises FolderError when something else is there, which might block whoever opens
    it, or mislead them."""
    path = folder / LOG_FILE
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return path
    except OSError as error:
        raise FolderError(f"runtime_dir: {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise FolderError(f"runtime_dir: {path} is no plain file (links are not followed), so it cannot be a log")
    return path


def remove_leftover(path: Path) -> None:
    """Raises FolderError when it is there and cannot be removed, such as a folder."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise FolderError(f"runtime_dir: {path} is in the way and cannot be removed: {_why(error)}") from error


def _why(error: OSError) -> str | None:
    return "it is a link, which is not followed" if error.errno == errno.ELOOP else error.strerror


class RuntimeFolder:
    """Held for the life of a daemon. The lock, not a socket, makes it the only one: a second bind on an ipc path
    succeeds and steals the clients of the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_private(path)
        self._lock = FileLock(path / LOCK_FILE)
        if not self._lock.acquire():
            raise AlreadyRunning(f"a daemon is already running in {path}")
        try:
            self._clear_leftovers()
        except FolderError:
            self._lock.release()
            raise

    def _clear_leftovers(self) -> None:
        """Files of a daemon that died: we hold the lock, so nobody uses them. Raises FolderError."""
        for path in (self.path / CONNECTION_FILE, self.path / TEMPORARY_FILE, *self.path.glob("*.sock")):
            remove_leftover(path)

    def publish(self, connection: dict[str, Any]) -> Path:
        """Write the connection file, all of it or nothing of it. To be done when everything is ready, not before."""
        target = self.path / CONNECTION_FILE
        temporary = self.path / TEMPORARY_FILE
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(connection, file, indent=1)
        temporary.replace(target)
        return target

    def release(self) -> None:
        """Take everything back but the log; the lock goes last, whatever else is left."""
        try:
            self._clear_leftovers()
        finally:
            self._lock.release()


class FileLock:
    """An flock on a file that is removed again at the end. Whoever gets the lock looks whether the file is still the
    one at that path: it may have been removed meanwhile. `name` is that of the setting to blame."""

    def __init__(self, path: Path, name: str = "runtime_dir") -> None:
        self._path = path
        self._name = name
        self._descriptor = -1

    def acquire(self) -> bool:
        """False when another process has it. Raises FolderError when there can be no such file."""
        give_up = time.monotonic() + LOCK_PATIENCE_SECONDS
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise FolderError(f"{self._name}: {self._path} cannot be a lock file: {_why(error)}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._path.exists() and os.fstat(descriptor).st_ino == self._path.stat().st_ino:
                    self._descriptor = descriptor
                    return True
            except BlockingIOError:
                if time.monotonic() > give_up:
                    os.close(descriptor)
                    return False
            os.close(descriptor)
            time.sleep(0.02)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def is_locked(path: Path) -> bool:
    """Whether a daemon is alive in this folder. Raises FolderError when it is not ours."""
    require_private(path)
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise FolderError(f"runtime_dir: {path / LOCK_FILE} is no lock file: {_why(error)}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
