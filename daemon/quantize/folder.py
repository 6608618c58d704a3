"""A folder that is there whole or not at all: written beside its place and renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer.daemon.setting import ConfigError
from deepinfer.stages.model.folder_names import CONFIG


def check_place(target: Path, source: Path, force: bool) -> None:
    """Raises ConfigError where a new folder may not be put."""
    if target.resolve() == source.resolve() or source.resolve().is_relative_to(target.resolve()):
        raise ConfigError(f"DST is {str(target)!r}, which is the source or holds it; give another folder")
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise ConfigError(f"DST is {str(target)!r}, which exists; --force replaces it")
    if target.is_symlink() or not target.is_dir() or not ((target / CONFIG).exists() or _is_empty(target)):
        raise ConfigError(f"DST is {str(target)!r}, which is no model folder; --force replaces nothing else")


def _is_empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None


def check_room(target: Path, nbytes: int) -> None:
    """Raises ConfigError if the file system of `target` has no room for `nbytes` more."""
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise ConfigError(f"DST needs {nbytes:,} bytes; the file system of {parent} has {free:,} free")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Gives a scratch folder beside `target`, which it becomes when the block ends well; else it is removed. What was
    there before is moved away, never mixed with the new."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.part-"))
    scratch.chmod(0o777 & ~_umask())
    try:
        yield scratch
        with _moved_away(target):
            os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _moved_away(target: Path) -> Iterator[None]:
    if not target.exists():
        yield
        return
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old-"))
    os.rename(target, old)
    try:
        yield
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
