"""The shapes of the paged attention kernels: what fits a CTA, how a context is cut, which macros say so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer.kernels.codecs import BF16, FP8_E4M3, FP8_E5M2, FP16, INT8, Codec
from deepinfer.kernels.cuda.source import KernelSource

THREADS = 128
MAX_CONTEXT, MAX_PARTITIONS = 131072, 256
HEAD_DIMS, BLOCK_SIZES, MAX_GROUP = (64, 80, 96, 128, 256), (8, 16, 32, 64), 16
CUDA_CODECS = (BF16, FP16, INT8, FP8_E4M3, FP8_E5M2)
MERGE_SHARED_BYTES = 4 * (MAX_PARTITIONS + THREADS // 32 + 4 * THREADS)
"""Shared memory of a CTA that merges partitions."""
_WARPS, _CHUNK, _LARGEST_PARTITION = THREADS // 32, 128, 512
_MAX_SHARED_BYTES, _SM_SHARED_BYTES, _CTA_RESERVED_BYTES = 48 * 1024, 100 * 1024, 1024


def num_partitions(visible: np.ndarray) -> np.ndarray:
    """Partitions of contexts of `visible` tokens each: a function of the context alone, as in partitions.h."""
    size = np.where(visible <= 4096, 128, np.where(visible <= 16384, 256, _LARGEST_PARTITION))
    return -(-visible // size)


def most_partitions(visible: int) -> int:
    """The most partitions of any context of 1 to `visible` tokens: beyond a limit a longer one has fewer."""
    return int(num_partitions(np.minimum(visible, (4096, 16384, MAX_CONTEXT))).max())


def workspace_floats(rows: int, q_heads: int, head_dim: int, partitions: int) -> int:
    """What a pass over `rows` rows takes for rotated queries and for the sums of up to `partitions` partitions."""
    return rows * q_heads * (head_dim + partitions * (head_dim + 2))


def workspace_bytes(rows: int, q_heads: int, head_dim: int, visible: int) -> int:
    """The same for rows that are attended one by one, with contexts of up to `visible` tokens."""
    return 4 * workspace_floats(rows, q_heads, head_dim, most_partitions(visible))


@dataclass(frozen=True)
class DecodePlan:
    """One specialisation of paged attention. Raises ValueError for what no kernel exists for, with what works."""

    k: Codec
    v: Codec
    head_dim: int
    group: int
    block_size: int
    key_bias: bool = False
    soft_cap: bool = False

    def __post_init__(self) -> None:
        names = ", ".join(codec.name for codec in CUDA_CODECS)
        for side, codec in (("K", self.k), ("V", self.v)):
            if codec not in CUDA_CODECS:
                raise ValueError(f"no CUDA kernel stores {side} as {codec.name}: use one of {names}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"no CUDA kernel for head_dim {self.head_dim}: there are {HEAD_DIMS}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"no CUDA kernel for block size {self.block_size}: there are {BLOCK_SIZES}")
        if not 1 <= self.group <= MAX_GROUP:
            raise ValueError(f"{self.group} query heads per KV head: CUDA kernels take 1 to {MAX_GROUP}")

    @property
    def name(self) -> str:
        """The kernel's suffix: fp16, int8, bf16, fp8 (whichever kinds), or K and V where they are no pair."""
        k, v = ("fp8" if codec in (FP8_E4M3, FP8_E5M2) else codec.name for codec in (self.k, self.v))
        return k if k == v else f"{k}_{v}"

    @property
    def group_padded(self) -> int:
        """Query heads, padded to a power of two."""
        return 1 << (self.group - 1).bit_length()

    @property
    def stage_bytes(self) -> int:
        """Bytes of one of the two stages that tiles are copied into."""
        return max(_tile_bytes(self.head_dim, codec) for codec in (self.k, self.v))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: stages, queries, scores, reduction, scales, blocks; or the final sums."""
        floats = (self.group + self.key_bias) * self.head_dim + self.group_padded * (_CHUNK + _WARPS + 1)
        halves = (self.k.scaled + self.v.scaled) * _LARGEST_PARTITION
        blocks = (_LARGEST_PARTITION // self.block_size + 2) // 2 * 16
        parts = 2 * self.stage_bytes + blocks + 4 * floats + 2 * halves
        total = -(-max(parts, THREADS * self.group * 16) // 16) * 16
        if total > _MAX_SHARED_BYTES:
            raise ValueError(f"{self} needs {total} bytes of shared memory")
        return total

    @property
    def ctas_per_sm(self) -> int:
        """CTAs per multiprocessor that the assembler keeps registers for.

        As many as an sm_86 has shared memory for, but at most 3 (168 registers), or 2 (255) for large groups.
        """
        return min(3 if self.group <= 8 else 2, _SM_SHARED_BYTES // (self.shared_bytes + _CTA_RESERVED_BYTES))

    def decode_source(self) -> KernelSource:
        """Attention of a partition."""
        return KernelSource(
            "paged_decode.cu",
            f"dp_paged_gqa_decode_{self.name}",
            (
                *self.macros,
                ("GROUP", self.group),
                ("KEY_BIAS", int(self.key_bias)),
                ("SOFT_CAP", int(self.soft_cap)),
                ("GROUP_PADDED", self.group_padded),
                ("K_SLICES", _slices(self.head_dim, self.k)),
                ("V_SLICES", _slices(self.head_dim, self.v)),
                ("STAGE_BYTES", self.stage_bytes),
                ("CTAS_PER_SM", self.ctas_per_sm),
            ),
        )

    def merge_source(self, out_kind: int, prefill: bool = False) -> KernelSource:
        """The merge of partitions; `out_kind` 0 writes fp32, 1 bf16, 2 fp16."""
        limit = ("MAX_PARTITIONS", MAX_PARTITIONS), ("PREFILL", int(prefill))
        macros = ("HEAD_DIM", self.head_dim), ("OUT_KIND", out_kind), *limit
        return KernelSource("merge_partitions.cu", "dp_merge_partitions", macros)

    def write_source(self, in_kind: int, qk_norm: bool, rotate: bool = True) -> KernelSource:
        """RoPE, encoding and scatter; `in_kind` as `out_kind` of `merge_source`."""
        macros = (*self.macros, ("IN_KIND", in_kind), ("QK_NORM", int(qk_norm)), ("ROTATE", int(rotate)))
        return KernelSource("kv_write.cu", f"dp_kv_write_{self.name}", macros)

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """Of every kernel that touches the pool."""
        codecs = ("K_CODEC", self.k.number), ("V_CODEC", self.v.number)
        return ("HEAD_DIM", self.head_dim), ("BLOCK_SIZE", self.block_size), *codecs


def _slices(head_dim: int, codec: Codec) -> int:
    """Threads that share a token: the fewest with which each has at most five 16-byte pieces of it."""
    pieces, slices = head_dim * codec.itemsize // 16, 1
    while pieces // slices > 5:
        slices *= 2
    return slices


def _tile_bytes(head_dim: int, codec: Codec) -> int:
    """Bytes of a tile, whose rows are padded to an odd multiple of the slices."""
    slices = _slices(head_dim, codec)
    pieces = head_dim * codec.itemsize // 16
    padded = pieces if pieces // slices % 2 else pieces + slices
    return THREADS // slices * padded * 16
