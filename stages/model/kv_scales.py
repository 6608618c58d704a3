"""KV scales that checkpoints carry (k_scale, v_scale): read, counted and reported. No KV format of ours uses them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from deepinfer.stages.model.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"model\.layers\.\d+\.self_attn\."
    r"(?:(?:attn\.)?(?P<side>[kv])_scale|(?P<projection>[kv])_proj\.(?:(?P=projection)_scale|output_scale))"
)


class KVScales:
    """Four spellings: `self_attn.k_scale`, `self_attn.attn.k_scale`, `self_attn.k_proj.k_scale` and
    `self_attn.k_proj.output_scale`, the same for v. A scale is one number or one for each head.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {"k": [], "v": []}
        self._count = 0

    @staticmethod
    def is_one(name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    def add(self, path: Path, name: str, values: torch.Tensor) -> None:
        """Raises CheckpointError for values that no scale can have."""
        match = _NAME.fullmatch(name)
        values = values.float()
        if match is None or not values.numel() or not bool((torch.isfinite(values) & (values > 0)).all()):
            raise CheckpointError(f"{path}: KV scale {name} holds values that are not positive numbers")
        self._count += 1
        self._values[match["side"] or match["projection"]] += [float(values.min()), float(values.max())]

    def report(self) -> dict[str, object]:
        """For `status`: how many tensors, their ranges, and that they are not used. Empty without any."""
        if not self._count:
            return {}
        ranges = {side: [min(values), max(values)] for side, values in self._values.items() if values}
        return {"kv_scales": {"count": self._count, **ranges, "used": False}}

    def log(self, folder: Path) -> None:
        if self._count:
            logger.info(
                "%s: %d KV scales are not used: the int8 KV format finds its own for each token, the others have none",
                folder, self._count,
            )  # fmt: skip
