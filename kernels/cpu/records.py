"""How packed weights lie in memory: the order in which every matmul of ours reads them.

The weights of sixteen outputs and one group along K are a record: codes [group / 2, 16, 2] (pair of k, output, k of the
pair), then sixteen scales, then for 4-bit codes sixteen minima. 4-bit codes lie four pairs in a vector of 64
bytes: bits 4 i .. 4 i + 3 of its 16-bit word number 2 * output + (k of the pair) belong to its pair i. The four bytes
of an output then hold k = 0, 4, 1, 5 of eight in their lower halves and 2, 6, 3, 7 in their upper ones.
"""

from __future__ import annotations

from deepinfer.kernels.cpu.vec16 import LANES

P_INT4, P_INT8, P_BF16, P_INT4_WORDS, P_INT8_WORDS = range(5)
"""Kinds of weights: w = scale * code + minimum, w = scale * code, w = code. The last two are the first two with codes
of 16 bits, which a matmul of many rows makes for itself."""
CODE_BITS = (4, 8, 16, 16, 16)
SCALES = (2, 1, 0, 2, 1)
"""Vectors of scales and minima in a record."""
BLOCK = LANES
"""Outputs of a record."""


def record_bytes(kind: int, group: int, wide: bool) -> int:
    """Of sixteen outputs and `group` k. `wide`: scales and minima are fp32 and not fp16."""
    return BLOCK * (group * CODE_BITS[kind] // 8 + SCALES[kind] * (4 if wide else 2))
