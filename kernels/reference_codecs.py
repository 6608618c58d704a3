"""The plain torch form of every KV codec: the definition that the compiled forms are compared with, byte for
byte.

Bytes are handled as uint8 throughout, because torch's CPU float8 types lack most operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.codecs import Codec

_STORAGE = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_LARGEST_SCALE = 65504.0


def sanitize(codec: Codec, x: Tensor) -> tuple[Tensor, int, Tensor]:
    """Make x[..., D] storable: (fp32 [..., D] finite and clamped, saturated elements, bool[..., D]
    non-finite)."""
    x = x.float()
    nonfinite = ~torch.isfinite(x)
    finite = torch.where(nonfinite, torch.zeros((), dtype=torch.float32), x)
    saturated = int((finite.abs() > codec.max_finite).sum())
    return finite.clamp(-codec.max_finite, codec.max_finite), saturated, nonfinite


def encode(codec: Codec, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """See `Codec.encode`."""
    clean, _, _ = sanitize(codec, x)
    if codec.scaled:
        return _encode_int8(clean)
    return clean.to(_STORAGE[codec.name]).contiguous().view(torch.uint8), None


def decode(codec: Codec, codes: Tensor, scales: Tensor | None) -> Tensor:
    """See `Codec.decode`."""
    if codec.scaled:
        if scales is None:
            raise ValueError(f"codec {codec.name} needs its scales to decode")
        return codes.contiguous().view(torch.int8).float() * scales.float().unsqueeze(-1)
    return codes.contiguous().view(_STORAGE[codec.name]).float()


def _encode_int8(clean: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric: scale = absmax / 127 rounded to fp16, code = round(x / stored scale). A zero scale gives
    codes 0."""
    scales = (clean.abs().amax(dim=-1) / 127.0).clamp(max=_LARGEST_SCALE).half()
    divisor = scales.float().unsqueeze(-1)
    codes = torch.where(divisor > 0, clean / divisor, torch.zeros((), dtype=torch.float32))
    return codes.round().clamp(-127, 127).to(torch.int8).view(torch.uint8), scales
