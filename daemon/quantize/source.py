"""The model that is to be quantised, opened and checked: its headers in the order in which they are best read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deepinfer.daemon.setting import ConfigError
from deepinfer.stages.model import open_checkpoint
from deepinfer.stages.model.checkpoint import Checkpoint
from deepinfer.stages.model.safetensors_source import SafetensorsSource

_UNQUANTISED = ("F32", "F16", "BF16")


def open_source(path: Path) -> Checkpoint:
    """Everything that its headers can show to be wrong is raised here. A folder's tensors have the names and shapes of
    its files. Raises ConfigError for a folder that is quantised already."""
    checkpoint = open_checkpoint(path)
    if checkpoint.format == "gguf":
        return checkpoint
    checkpoint.source.close()
    kinds = {header.dtype for header in checkpoint.source.headers.values()} - set(_UNQUANTISED)
    if kinds:
        raise ConfigError(
            f"SRC is {str(path)!r}, which is quantised already ({', '.join(sorted(kinds))}); give the model in fp16, "
            "bf16 or fp32, or a GGUF file"
        )
    return replace(checkpoint, source=SafetensorsSource(path))


def quantised_types(checkpoint: Checkpoint) -> dict[str, int]:
    """Tensors by type, of those that were quantised before: they are rounded a second time."""
    counts: dict[str, int] = {}
    for header in checkpoint.source.headers.values():
        if header.dtype not in _UNQUANTISED:
            counts[header.dtype] = counts.get(header.dtype, 0) + 1
    return counts
