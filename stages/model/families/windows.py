"""Which layers have a sliding window, as config.json says it."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.stages.model.config import FULL, SLIDING
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.json_fields import ConfigFields


def one_window(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """`sliding_window` in every layer, or nowhere when it is null."""
    window = 0 if fields.get("sliding_window") is None else fields.integer("sliding_window")
    return (window,) * num_layers


def layer_kinds(fields: ConfigFields, num_layers: int, default: Sequence[str]) -> list[str]:
    """`layer_types`, or `default`. Raises for a kind that is neither sliding nor full, and for a wrong number."""
    kinds = fields.get("layer_types") or list(default)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"{fields.where}: layer_types must name {num_layers} layers, got {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds} - {SLIDING, FULL})
    if unknown:
        raise UnsupportedModelError(
            f"{fields.where}: layer_types {', '.join(unknown)} are not supported; supported: {FULL}, {SLIDING}"
        )
    return kinds


def windows_of(fields: ConfigFields, kinds: Sequence[str]) -> tuple[int, ...]:
    """`sliding_window` where the kind is sliding. Null switches it off."""
    window = 0 if fields.get("sliding_window") is None else fields.integer("sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)
