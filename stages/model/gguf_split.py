"""The header of a GGUF model that may be split over several files: metadata of the first part, tensors of all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from deepinfer.stages.model.errors import CheckpointError
from deepinfer.stages.model.gguf_header import GGUFHeader, GGUFTensor, read_header
from deepinfer.stages.model.gguf_names import part_names


def read_model_header(path: Path) -> GGUFHeader:
    """`path` is the only file, or the first part. Raises CheckpointError that names the part that is missing or wrong,
    and whatever `read_header` raises.
    """
    first = read_header(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 1 <= count <= 99999:
        raise CheckpointError(f"{path}: split.count is {count!r}, expected 1 to 99999")
    if count == 1:
        return first
    parts = _paths(path, first, count)
    tensors: dict[str, GGUFTensor] = dict(first.tensors)
    for number, part in enumerate(parts[1:], start=1):
        header = read_header(part)
        found = header.metadata.get("split.no"), header.metadata.get("split.count")
        if found != (number, count):
            raise CheckpointError(
                f"{part}: split.no and split.count are {found[0]} and {found[1]}, expected {number} and {count}"
            )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part}: tensor {name} is in {tensors[name].path.name} too")
            tensors[name] = tensor
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(f"{path}: split.tensors.count is {total!r}, yet the {count} parts hold {len(tensors)}")
    return dataclasses.replace(first, tensors=tensors)


def _paths(path: Path, first: GGUFHeader, count: int) -> list[Path]:
    names = part_names(path.name)
    if names is None or len(names) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts, whose names must end in -00001-of-{count:05}.gguf and so on"
        )
    parts = [path.with_name(name) for name in names]
    if first.metadata.get("split.no") != 0 or path.name != names[0]:
        raise CheckpointError(f"{path} is not the first of {count} parts; give {parts[0]}")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path.parent}: of the {count} parts of {path.name}, missing: {', '.join(missing)}")
    return parts
