"""KV codecs: how one side (K or V) of the cache is stored. Sizes and limits only; no tensor library is
imported here.

The same codec exists in three languages: torch (`reference_codecs`), numba (`cpu.codecs`) and CUDA. All three
produce the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Codec:
    """One storage format of K or V elements.

    `number` identifies the codec inside compiled kernels. `max_finite` is the largest magnitude that is
    stored as it is; larger finite inputs saturate (for int8 it is the largest scale times 127). `scaled`
    codecs keep one fp16 scale per token and KV head.
    """

    name: str
    number: int
    itemsize: int
    scaled: bool
    max_finite: float

    @property
    def scale_itemsize(self) -> int:
        """Bytes of the scale of one token and KV head: 2 (fp16) or 0."""
        return 2 if self.scaled else 0

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Encode x[..., D] (any float dtype) to (uint8[..., D * itemsize], fp16 scales[...] or None).

        Clamps to `max_finite`, rounds once to nearest even, keeps the sign of zero, stores non-finite input
        as 0.
        """
        from deepinfer.kernels import reference_codecs  # torch stays out of processes that only plan

        return reference_codecs.encode(self, x)

    def decode(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """Decode uint8[..., D * itemsize] and fp16 scales[...] (None if unscaled) to fp32 [..., D]."""
        from deepinfer.kernels import reference_codecs

        return reference_codecs.decode(self, codes, scales)


FP32 = Codec("fp32", 0, 4, False, 3.4028234663852886e38)
BF16 = Codec("bf16", 1, 2, False, 3.3895313892515355e38)
FP16 = Codec("fp16", 2, 2, False, 65504.0)
INT8 = Codec("int8", 3, 1, True, 127.0 * 65504.0)
FP8_E4M3 = Codec("fp8_e4m3", 4, 1, False, 448.0)
FP8_E5M2 = Codec("fp8_e5m2", 5, 1, False, 57344.0)

CODECS: tuple[Codec, ...] = (FP32, BF16, FP16, INT8, FP8_E4M3, FP8_E5M2)
