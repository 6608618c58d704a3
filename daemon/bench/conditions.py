"""Where a result comes from: machine, versions, command, engine, and which weights were served."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepinfer.clients import Client
from deepinfer.stages.model.gguf_names import part_names


def conditions() -> dict[str, Any]:
    """What every result file says of where it came from."""
    packages = ("deepinfer-daemon", "torch", "numba", "transformers", "pyzmq")
    return {
        "command": "deepinfer-daemon " + " ".join(sys.argv[1:]),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {name: version(name) for name in packages},
        "date": time.strftime("%Y-%m-%d"),
    }


def engine_facts(status: dict[str, Any]) -> dict[str, Any]:
    """`engine` of a status without paths of this machine: a result file is for others too."""
    return _without_paths(status["engine"])


def _without_paths(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: _without_paths(part)
        for name, part in value.items()
        if not (isinstance(part, str) and Path(part).is_absolute())
    }


def cpu_name() -> str:
    """As the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def model_sha256(path: Path) -> str:
    """SHA-256 of the file, or of all weight files of the folder, by name."""
    digest = hashlib.sha256()
    for file in weight_files(path):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def weight_files(path: Path) -> Iterator[Path]:
    """The file, with the other parts of a split one, or all weight files of the folder, by name."""
    if path.is_file():
        yield from (path.with_name(name) for name in part_names(path.name) or [path.name])
    else:
        yield from sorted(path.glob("*.safetensors"))


def served_sha256(client: Client, status: Mapping[str, Any]) -> str | None:
    """Of the weights that a daemon of this machine serves. None for one that was named by its endpoint: its path may
    mean another file here."""
    path = Path(status["engine"]["checkpoint"]["path"])
    return model_sha256(path) if client.connection.pid is not None and path.exists() else None
