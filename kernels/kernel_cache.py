"""Where compiled kernels lie on disk, and the end of those that no program has used for long.

Whoever uses a folder of kernels holds a shared lock on a file in it for as long as it lives, and dates it anew at its
start. Whoever removes a folder has that lock alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

logger = logging.getLogger(__name__)

VARIABLE = "DEEPINFER_CACHE_DIR"
UNUSED_SECONDS = 30 * 86_400
"""What was not used for so long is removed."""
VERSIONS_KEPT = 16
"""Folders of other versions that are kept however long ago they were used, short of that."""
IN_USE, LOCK, STARTS = "in-use", "lock", "starts"
POLL_SECONDS = 0.005


def cache_folder() -> Path:
    """`DEEPINFER_CACHE_DIR`, else the user's cache folder. Not created here."""
    override = os.environ.get(VARIABLE)
    return Path(override) if override else platformdirs.user_cache_path("deepinfer-daemon")


def cpu_folder() -> Path:
    """Of the compiled CPU kernels, one for each state of their sources: numba itself only notices changes in the outer
    function's file. Below `NUMBA_CACHE_DIR` where that is set. Not created here."""
    digest = hashlib.sha256()
    for source in sorted((Path(__file__).parent / "cpu").glob("*.py")):
        digest.update(source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or cache_folder() / "numba"
    return Path(base) / digest.hexdigest()[:16]


@contextmanager
def one_at_a_time(folder: Path, patience: float) -> Iterator[None]:
    """Of all who compile into a folder, which is made if it is not there. Who has waited for `patience` seconds goes on
    beside the other, which costs time and nothing else. The kernel ends the lock of a process that dies."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until = time.monotonic() + patience
        while not _try_lock(descriptor) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold(folder: Path) -> None:
    """Until this process ends, nobody removes the folder, which is made if it is not there.

    Raises OSError where no file can be written."""
    path = folder / IN_USE
    while not _hold(path):
        pass


def _hold(path: Path) -> bool:
    """False when the folder was removed meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            os.utime(descriptor)
            return True
    except FileNotFoundError:
        pass
    os.close(descriptor)
    return False


def remove_unused_versions(folder: Path, contents: Collection[str]) -> list[Path]:
    """Of the folders beside this one that are named in the same way and have nothing else in them than `contents`:
    those that were not used for `UNUSED_SECONDS`, and those that were used before `VERSIONS_KEPT` others. Returns the
    removed ones; what a running program holds is left."""
    known = {*contents, IN_USE}
    others = [other for other in folder.parent.iterdir() if other != folder and _is_version(other, folder.name, known)]
    last_used = {other: _last_used(other) for other in others}
    by_use = sorted(others, key=last_used.__getitem__, reverse=True)
    oldest = time.time() - UNUSED_SECONDS
    unused = [other for rank, other in enumerate(by_use) if rank >= VERSIONS_KEPT or last_used[other] < oldest]
    removed = [other for other in unused if _remove(other)]
    if removed:
        logger.info("removed compiled kernels of %d other versions from %s", len(removed), folder.parent)
    return removed


def _is_version(path: Path, like: str, known: set[str]) -> bool:
    digits = set("0123456789abcdef")
    named = len(path.name) == len(like) and set(path.name) <= digits
    return named and path.is_dir() and not path.is_symlink() and {entry.name for entry in path.iterdir()} <= known


def _last_used(folder: Path) -> float:
    """Versions before this one date nothing at their start, but files when they compile."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:  # Someone is at work there.
        return time.time()


def _remove(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return not folder.exists()


def remove_unused_files(folder: Path) -> list[Path]:
    """Those that were not written or used for `UNUSED_SECONDS`. Returns the removed ones. Whoever uses a file dates it
    anew, and makes it again if it is not there."""
    oldest = time.time() - UNUSED_SECONDS
    removed = []
    for path in folder.iterdir():
        try:
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()
                removed.append(path)
        except FileNotFoundError:  # Someone else removed it.
            continue
    if removed:
        logger.info("removed %d compiled kernels that nobody has used for long from %s", len(removed), folder)
    return removed
