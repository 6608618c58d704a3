"""Which files of a hub repository make a model: the folder's, or one GGUF of several, by file name or quantisation."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from deepinfer.stages.model.errors import ModelNotFoundError
from deepinfer.stages.model.folder_names import CONFIG
from deepinfer.stages.model.gguf_names import part_names

_COMPANIONS = re.compile(r"[^/]+\.(json|txt|jinja)|tokenizer\.model")
_WEIGHTS = re.compile(r"model[^/]*\.safetensors")
_NO_MODEL = re.compile(r"(^|/)(mmproj|imatrix)|imatrix", re.IGNORECASE)


def folder_files(names: Collection[str]) -> list[str]:
    """Weights, JSON and tokenizer at the top of a repository; empty if it holds no folder of safetensors."""
    weights = sorted(name for name in names if _WEIGHTS.fullmatch(name))
    if not weights or CONFIG not in names:
        return []
    return weights + sorted(name for name in names if _COMPANIONS.fullmatch(name))


def gguf_files(names: Collection[str], wanted: str | None, where: str) -> list[str]:
    """The file `wanted`, or the one of that quantisation, and all its parts, the first part first. Without `wanted`
    there must be one only. Raises ModelNotFoundError that lists what there is."""
    models = _models(names)
    chosen = [parts for parts in models if wanted is None or _is_meant(parts, wanted)]
    if len(chosen) == 1:
        return list(chosen[0])
    listed = ", ".join(parts[0] for parts in models) or "none"
    if wanted is None:
        raise ModelNotFoundError(f"{where} holds several GGUF models; name one, as {where}:FILE: {listed}")
    what = f"no GGUF model {wanted!r}" if not chosen else f"{len(chosen)} GGUF models {wanted!r}"
    raise ModelNotFoundError(f"{where} holds {what}; its GGUF models: {listed}")


def _models(names: Collection[str]) -> list[Sequence[str]]:
    """Each as its parts. A model of which parts are missing is still one."""
    found: dict[str, Sequence[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _NO_MODEL.search(name):
            parts = part_names(name) or [name]
            found[parts[0]] = parts
    return list(found.values())


def _is_meant(parts: Sequence[str], wanted: str) -> bool:
    if wanted.lower().endswith(".gguf"):
        return wanted in parts
    words = re.escape(wanted.lower())
    return re.search(rf"(^|[-._/]){words}([-._/]|$)", parts[0].lower().removesuffix(".gguf")) is not None
