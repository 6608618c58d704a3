"""Which dtype a model computes in, and how many bytes its weights then take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deepinfer.stages.model.gguf_codes import GROUP, READERS
from deepinfer.stages.model.source import TensorHeader

DTYPES = ("auto", "fp32", "bf16")
_FAST_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
_CPUINFO = Path("/proc/cpuinfo")


def has_fast_bf16() -> bool:
    """Whether the processor multiplies bfloat16 itself (AVX512-BF16, AMX-BF16, Arm BF16)."""
    if not _CPUINFO.exists():
        return False
    for line in _CPUINFO.read_text().splitlines():
        if line.lower().startswith(("flags", "features")):
            return bool(_FAST_BF16_FLAGS & set(line.split(":", 1)[1].split()))
    return False


def choose_dtype(requested: str, headers: Mapping[str, TensorHeader]) -> str:
    """ "fp32" or "bf16". auto: bf16 for quantised files (W4A16 is fast in bf16 only) and, where the processor has
    bf16, for 16-bit files; fp32 for fp32 files. Raises ValueError for another name.
    """
    if requested not in DTYPES:
        raise ValueError(f"dtype {requested!r} is unknown; known: {', '.join(DTYPES)}")
    if requested != "auto":
        return requested
    matrices = {header.dtype for header in headers.values() if len(header.shape) == 2}
    if matrices == {"F32"}:
        return "fp32"
    if not matrices <= {"F32", "F16", "BF16"}:
        return "bf16"
    return "bf16" if has_fast_bf16() else "fp32"


def weight_bytes(headers: Mapping[str, TensorHeader], dtype: str, bf16_copies: bool) -> int:
    """Bytes in memory. W4A16 keeps half a byte a weight and two bf16 numbers a group; vectors stay fp32."""
    total = 0.0
    for header in headers.values():
        count = 1
        for extent in header.shape:
            count *= extent
        if len(header.shape) == 1 or dtype == "fp32":
            total += 4 * count
        elif header.dtype in READERS:
            total += count * (0.5 + 4 / GROUP + (2 if bf16_copies else 0))
        else:
            total += 2 * count
    return int(total)
