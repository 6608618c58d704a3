"""Prints what the paged attention kernels take on sm_86: registers, shared memory, spills, instructions of the inner
loops. Compiles and disassembles; needs no GPU.

    python -m deepinfer.kernels.cuda.report [head_dim ...]
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from deepinfer.kernels.cuda.decode_plan import DecodePlan
from deepinfer.kernels.cuda.nvrtc import REFERENCE_ARCH, Compiled, compile_kernel, version
from deepinfer.kernels.cuda.prefill_plan import PrefillPlan
from deepinfer.kernels.cuda.sass import Loop, disassemble, innermost_loops, longest_loop
from deepinfer.kernels.kv_formats import resolve_kv_format

PREFILL_FORMATS = ("fp16", "bf16", "int8", "e4m3", "e5m2")
FORMATS = ("fp16", "int8", "e4m3", "e5m2", "e4m3/e5m2")
GROUPS = (1, 2, 4, 8)
_HEADER = (
    "| K/V | head_dim | group | registers | shared bytes | spill bytes | K loop | of fp16 | V loop | of fp16 |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)

_PREFILL_HEADER = (
    "| K/V | head_dim | tokens a tile | registers | shared bytes | spill bytes | instructions a tile | tensor core |\n"
    "|---|---|---|---|---|---|---|---|"
)


def inner_loops(compiled: Compiled, group: int) -> tuple[Loop, Loop]:
    """The loop that multiplies keys and the loop that mixes values, in this order.

    Raises ValueError if there are not two innermost loops with a multiply-add for every head of four elements.
    """
    loops = [loop for loop in innermost_loops(disassemble(compiled.cubin)) if loop.opcodes["FFMA"] >= 4 * group]
    if len(loops) != 2:
        raise ValueError(f"{len(loops)} loops with multiply-adds instead of 2: the compiler has changed their shape")
    return loops[0], loops[1]


def instructions_per_element(loop: Loop, group: int) -> float:
    """All instructions of a loop's body for each element that it decodes: there is one FFMA per element and head."""
    return len(loop.instructions) / (loop.opcodes["FFMA"] / group)


class Row(NamedTuple):
    """One specialisation: what it takes, and instructions for each element of K and of V, beside fp16's."""

    kv: str
    head_dim: int
    group: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    k_loop: float
    k_of_fp16: float
    v_loop: float
    v_of_fp16: float

    @property
    def of_fp16(self) -> float:
        """K and V together."""
        return (self.k_loop + self.v_loop) / (self.k_loop / self.k_of_fp16 + self.v_loop / self.v_of_fp16)


def rows(head_dim: int, group: int) -> list[Row]:
    """A row for each format. Raises CompileError without compiler or disassembler."""
    base_k, base_v = _counts("fp16", head_dim, group)
    found = []
    for fmt in FORMATS:
        plan = _plan(fmt, head_dim, group)
        used = compile_kernel(plan.decode_source()).resources
        k, v = _counts(fmt, head_dim, group)
        name, spilled = resolve_kv_format(fmt).name, used.spill_stores + used.spill_loads
        found.append(
            Row(name, head_dim, group, used.registers, plan.shared_bytes, spilled, k, k / base_k, v, v / base_v)
        )
    return found


class PrefillRow(NamedTuple):
    """One specialisation of the prefill kernel, and a warp's instructions for one tile of tokens: staging, decoding and
    softmax are in them. A loop over dimensions (head_dim 256) is counted once."""

    kv: str
    head_dim: int
    tile_tokens: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    instructions: int
    tensor_core: int


def prefill_row(fmt: str, head_dim: int) -> PrefillRow:
    """Of a group of 4, which changes addresses only. Raises CompileError without compiler or disassembler."""
    plan = PrefillPlan(_plan(fmt, head_dim, 4))
    compiled = compile_kernel(plan.source())
    used, loop = compiled.resources, longest_loop(disassemble(compiled.cubin))
    spilled = used.spill_stores + used.spill_loads
    sizes = plan.tile_tokens, used.registers, plan.shared_bytes, spilled
    return PrefillRow(resolve_kv_format(fmt).name, head_dim, *sizes, len(loop.instructions), loop.opcodes["HMMA"])


def _plan(fmt: str, head_dim: int, group: int) -> DecodePlan:
    pair = resolve_kv_format(fmt)
    return DecodePlan(pair.k, pair.v, head_dim, group, 16)


def _counts(fmt: str, head_dim: int, group: int) -> tuple[float, float]:
    k, v = inner_loops(compile_kernel(_plan(fmt, head_dim, group).decode_source()), group)
    return instructions_per_element(k, group), instructions_per_element(v, group)


def main() -> None:
    head_dims = [int(argument) for argument in sys.argv[1:]] or [128]
    print(f"{REFERENCE_ARCH}, NVRTC {'.'.join(map(str, version()))}, block size 16\n\n{_HEADER}")
    for head_dim in head_dims:
        for group in GROUPS:
            for row in rows(head_dim, group):
                cells = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row)
                print(f"| {' | '.join(cells)} |")
    print(f"\n{_PREFILL_HEADER}")
    for head_dim in head_dims:
        for fmt in PREFILL_FORMATS:
            print(f"| {' | '.join(map(str, prefill_row(fmt, head_dim)))} |")


if __name__ == "__main__":
    main()
