"""From what a user types to files on disk: a path, an alias, or the id of a model on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from deepinfer.stages.model.errors import ModelNotFoundError
from deepinfer.stages.model.gguf_names import part_names
from deepinfer.stages.model.wheel_model import SMOLLM2_135M, WheelModel, obtain

ALIASES: dict[str, WheelModel] = {"smollm2-135m": SMOLLM2_135M}
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:[:/](?P<file>[\w./-]+\.gguf))?")
_FOLDER_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]
_DUPLICATES = ["consolidated*", "original/*", "onnx/*"]


def resolve_model(name_or_path: str | Path) -> Path:
    """A GGUF file or a folder, fetched if need be and then found again without the network.

    Accepts an existing path, an alias ("smollm2-135m"), "org/name" (safetensors) and "org/name:file.gguf", with
    all its parts if it is split.
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
    match = _HUB_ID.fullmatch(name)
    if match is not None and not name.startswith((".", "/", "~")):
        return _from_hub(match["repo"], match["file"])
    raise ModelNotFoundError(f"model {name!r} does not exist here; expected {_expected()}")


def _expected() -> str:
    return (
        "the path of a GGUF file or of a folder with config.json and safetensors, "
        f"an alias ({', '.join(ALIASES)}), or a hub id (org/name or org/name:file.gguf)"
    )


def _from_hub(repo: str, file: str | None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if file is not None:
            first, *others = part_names(file) or [file]
            for other in others:
                hf_hub_download(repo, other)
            return Path(hf_hub_download(repo, first))
        return Path(snapshot_download(repo, allow_patterns=_FOLDER_FILES, ignore_patterns=_DUPLICATES))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"model {repo!r} is not in the hub cache and the hub cannot be reached; "
            f"connect once to fetch it, or give {_expected()}"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFoundError(f"model {repo!r} could not be fetched: {error}; expected {_expected()}") from error
