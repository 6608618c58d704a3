"""Which dtype a model computes in, and how many bytes its weights then take."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from deepinfer.kernels import packed_linear
from deepinfer.stages.model.config import HEAD
from deepinfer.stages.model.gguf_codes import GROUP
from deepinfer.stages.model.source import TensorHeader

DTYPES = ("auto", "fp32", "bf16")
W4_PREFILL = ("auto", "bf16", "int4")
FUSED = (
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
)
"""Matrices of one layer that are multiplied as one."""
_PACK_ROWS = 16
_IN_LAYER = re.compile(r"(.*layers\.\d+\.)(.+)")


def prefills_in_bf16(w4_prefill: str) -> bool:
    """Whether many rows meet 4-bit weights rounded to bf16. auto: where that is the faster one, by matrix tiles."""
    if w4_prefill not in W4_PREFILL:
        raise ValueError(f"w4_prefill {w4_prefill!r} is unknown; known: {', '.join(W4_PREFILL)}")
    return w4_prefill == "bf16" or (w4_prefill == "auto" and packed_linear.rounds_tiles())


def keeps_bf16_copies(w4_prefill: str) -> bool:
    """Whether that takes a copy of them, of two bytes a weight: matrix tiles are rounded while they are multiplied."""
    return prefills_in_bf16(w4_prefill) and not packed_linear.rounds_tiles()


def choose_dtype(requested: str, headers: Mapping[str, TensorHeader]) -> str:
    """Gives "fp32" or "bf16". auto: fp32 for fp32 files, bf16 for all others. Raises ValueError for another name."""
    if requested not in DTYPES:
        raise ValueError(f"dtype {requested!r} is unknown; known: {', '.join(DTYPES)}")
    if requested != "auto":
        return requested
    matrices = {header.dtype for header in headers.values() if len(header.shape) == 2}
    return "fp32" if matrices == {"F32"} else "bf16"


def weight_bytes(headers: Mapping[str, TensorHeader], dtype: str, bf16_copies: bool, cuda_kernels: bool) -> int:
    """Bytes in memory of what `load_model` makes of these tensors, to 2 % (zero biases, padding)."""
    return sum(_bytes_of(name, headers, dtype, bf16_copies, cuda_kernels) for name in headers)


def _bytes_of(name: str, headers: Mapping[str, TensorHeader], dtype: str, bf16_copies: bool, cuda_kernels: bool) -> int:
    shape = headers[name].shape
    count = math.prod(shape)
    if dtype == "fp32" or (len(shape) == 1 and name.endswith("weight")):
        return 4 * count
    if headers[name].int8 and is_table(name):
        return count + 2 * (count // GROUP)
    if len(shape) == 2 and is_packed(name, headers):
        if cuda_kernels:  # which also keep fp16 scales with zeros
            wide = headers[name].dtype == "Q4_K"
        else:
            wide = headers[name].wide
        scales_and_zeros = (8 if wide else 4) * (count // headers[name].group)
        return count // 2 + scales_and_zeros + (2 * count if bf16_copies and not is_table(name) else 0)
    return 2 * count


def is_table(name: str) -> bool:
    """Embedding or head, which keep 8-bit codes."""
    return _IN_LAYER.fullmatch(name) is None


def has_packed(headers: Mapping[str, TensorHeader]) -> bool:
    """Whether any matrix keeps its 4-bit codes in bf16 compute."""
    return any(len(header.shape) == 2 and is_packed(name, headers) for name, header in headers.items())


def is_packed(name: str, headers: Mapping[str, TensorHeader]) -> bool:
    """Whether a matrix keeps its 4-bit codes in bf16 compute: all that is fused with it must have codes as
    well, their columns in one order, and their rows fill the kernel's blocks. An embedding is never packed; a head is
    if it is not tied to one.
    """
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return name == HEAD and headers[name].group > 0 and headers[name].shape[0] % _PACK_ROWS == 0
    prefix, part = match.groups()
    together = next((group for group in FUSED if part in group), (part,))
    found = [headers[prefix + member] for member in together if prefix + member in headers]
    if len(found) < len(together):
        return False  # Whoever asks for the missing one says so.
    has_codes = all(header.group > 0 for header in found) and len({header.order for header in found}) == 1
    return has_codes and sum(header.shape[0] for header in found) % _PACK_ROWS == 0
