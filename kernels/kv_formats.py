"""KV formats: which codec K and V use, and where their bytes lie inside a block.

One resolver serves the pool and the memory planner, so a budget is never computed for another format than the
one that is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from deepinfer.kernels.codecs import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, INT8, Codec

_BY_NAME: dict[str, Codec] = {
    "fp32": FP32,
    "bf16": BF16,
    "fp16": FP16,
    "int8": INT8,
    "i8": INT8,
    "fp8": FP8_E4M3,
    "fp8_e4m3": FP8_E4M3,
    "e4m3": FP8_E4M3,
    "fp8_e5m2": FP8_E5M2,
    "e5m2": FP8_E5M2,
}
COMPUTE_DTYPES = ("fp32", "bf16", "fp16")
KV_FORMAT_NAMES = ("auto", *_BY_NAME)


class LayerOffsets(NamedTuple):
    """Byte offsets of one layer's parts inside a row. The scale offsets of unscaled codecs point at
    nothing."""

    k: int
    v: int
    k_scales: int
    v_scales: int


@dataclass(frozen=True)
class BlockLayout:
    """The bytes of one row of a pool: layer after layer K `[kv_heads, block_size, head_dim]`, V, K scales
    `[kv_heads, block_size]` fp16, V scales.

    A block is a row for each group of layers, and a sequence has a table of rows for each. `groups` says which layers
    each has, in their order in the row; a smaller one leaves the end of its rows unused. Empty: one group of all
    layers.
    """

    k: Codec
    v: Codec
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} must be a positive integer, not {value!r}")
        if self.groups and sorted(layer for group in self.groups for layer in group) != list(range(self.num_layers)):
            raise ValueError(f"groups must have each of the layers 0 .. {self.num_layers - 1} once, not {self.groups}")

    @property
    def k_bytes(self) -> int:
        """Bytes of the keys of one layer in a row."""
        return self._tokens * self.head_dim * self.k.itemsize

    @property
    def v_bytes(self) -> int:
        """Bytes of the values of one layer in a row."""
        return self._tokens * self.head_dim * self.v.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a row, scales included."""
        scales = self._tokens * (self.k.scale_itemsize + self.v.scale_itemsize)
        return self.k_bytes + self.v_bytes + scales

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: one row of the pool for each group of layers."""
        return self.num_groups * self.row_bytes

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row of the pool."""
        return self.layers_per_row * self.layer_bytes

    @property
    def num_groups(self) -> int:
        """Rows of a block."""
        return len(self.groups) or 1

    @property
    def layers_per_row(self) -> int:
        return max((len(group) for group in self.groups), default=self.num_layers)

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """By layer: its group, and its place among the group's layers."""
        groups = self.groups or (range(self.num_layers),)
        places = {layer: (number, at) for number, group in enumerate(groups) for at, layer in enumerate(group)}
        return tuple(places[layer] for layer in range(self.num_layers))

    def group_of(self, layer: int) -> int:
        """Whose table says where `layer` lies."""
        return self._places[layer][0]

    def layer_offsets(self, layer: int) -> LayerOffsets:
        """Where the parts of `layer` start inside a row of its group."""
        k = self._places[layer][1] * self.layer_bytes
        v = k + self.k_bytes
        k_scales = v + self.v_bytes
        return LayerOffsets(k, v, k_scales, k_scales + self._tokens * self.k.scale_itemsize)

    @property
    def _tokens(self) -> int:
        return self.num_kv_heads * self.block_size


@dataclass(frozen=True)
class KVFormat:
    """A pair of codecs. `name` is the codec's name, or `k/v` where they differ."""

    k: Codec
    v: Codec

    @property
    def name(self) -> str:
        return self.k.name if self.k is self.v else f"{self.k.name}/{self.v.name}"

    def layout(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        groups: Sequence[Sequence[int]] = (),
    ) -> BlockLayout:
        """The layout of a block of this format. Raises ValueError for sizes that are not positive integers, and for
        groups that do not have each layer once."""
        grouped = tuple(tuple(group) for group in groups)
        return BlockLayout(self.k, self.v, num_layers, num_kv_heads, head_dim, block_size, grouped)

    def block_bytes(self, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        """Bytes of one block, scales included."""
        return self.layout(num_layers, num_kv_heads, head_dim, block_size).block_bytes


def resolve_kv_format(name: str, compute_dtype: str = "fp16") -> KVFormat:
    """The format that `name` means.

    `name` is one of `KV_FORMAT_NAMES`, or two of them as "k/v". "auto" is `compute_dtype` ("fp32", "bf16",
    "fp16"). Raises ValueError, which lists the names, for anything else.
    """
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(f"compute dtype {compute_dtype!r} is not one of {', '.join(COMPUTE_DTYPES)}")
    sides = name.split("/") if isinstance(name, str) else []
    codecs = [_BY_NAME.get(compute_dtype if side == "auto" else side) for side in sides]
    if len(codecs) == 1:
        codecs *= 2
    if len(codecs) != 2 or codecs[0] is None or codecs[1] is None:
        names = ", ".join(KV_FORMAT_NAMES)
        raise ValueError(f"unknown KV format {name!r}: use one of {names}, or two of them as K/V, like e4m3/e5m2")
    return KVFormat(codecs[0], codecs[1])
