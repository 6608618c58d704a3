"""Kernels: KV codecs and formats, paged attention, quantised matmuls. Plain references stand beside every
fast path."""

from deepinfer.kernels.codecs import CODECS, Codec
from deepinfer.kernels.kv_formats import (
    KV_FORMAT_NAMES,
    BlockLayout,
    KVFormat,
    LayerOffsets,
    resolve_kv_format,
)

__all__ = [
    "CODECS",
    "KV_FORMAT_NAMES",
    "BlockLayout",
    "Codec",
    "KVFormat",
    "LayerOffsets",
    "resolve_kv_format",
]
