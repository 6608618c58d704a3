"""Compiled kernels on disk, by the fingerprint of everything that went into them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from deepinfer.kernels import kernel_cache

_DIGEST_BYTES = 32


def cache_folder() -> Path:
    """The folder of compiled kernels. Made for its owner alone: its files are loaded as code."""
    folder = kernel_cache.cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def load(key: str) -> bytes | None:
    """The bytes stored under `key`; None if there are none, or if they are not what was stored."""
    path = cache_folder() / key
    try:
        os.utime(path)
        content = path.read_bytes()
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
