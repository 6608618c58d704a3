"""Compiled kernels on disk, by the fingerprint of everything that went into them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import platformdirs

_DIGEST_BYTES = 32


def cache_folder() -> Path:
    """The folder of compiled kernels, below DEEPINFER_CACHE_DIR or the user's cache folder.

    Made for its owner alone: its files are loaded as code.
    """
    override = os.environ.get("DEEPINFER_CACHE_DIR")
    folder = (Path(override) if override else platformdirs.user_cache_path("deepinfer-daemon")) / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def load(key: str) -> bytes | None:
    """The bytes stored under `key`; None if there are none, or if they are not what was stored."""
    try:
        content = (cache_folder() / key).read_bytes()
    except FileNotFoundError:
        return None
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def store(key: str, payload: bytes) -> None:
    """Keep `payload` under `key`. Readers see all of it or nothing."""
    publish(cache_folder() / key, hashlib.sha256(payload).digest() + payload)


def publish(path: Path, content: bytes) -> None:
    """Write `path` in one step, whoever else writes it at the same time."""
    handle, draft = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(draft, path)
