"""Prints what the paged attention kernels take on sm_86: registers, shared memory, spills, instructions of the inner
loops. Compiles and disassembles; needs no GPU.

    python -m deepinfer.kernels.cuda.report [head_dim ...]
"""

from __future__ import annotations

import sys

from deepinfer.kernels.cuda.decode_plan import DecodePlan
from deepinfer.kernels.cuda.nvrtc import REFERENCE_ARCH, Compiled, compile_kernel, version
from deepinfer.kernels.cuda.sass import Loop, disassemble, innermost_loops
from deepinfer.kernels.kv_formats import resolve_kv_format

FORMATS = ("fp16", "int8", "e4m3", "e5m2", "e4m3/e5m2")
GROUPS = (1, 2, 4, 8)
_HEADER = (
    "| K/V | head_dim | group | registers | shared bytes | spill bytes | K loop | of fp16 | V loop | of fp16 |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
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


def _row(fmt: str, head_dim: int, group: int, baseline: tuple[float, float]) -> str:
    pair = resolve_kv_format(fmt)
    plan = DecodePlan(pair.k, pair.v, head_dim, group, 16)
    used = compile_kernel(plan.decode_source()).resources
    spilled = used.spill_stores + used.spill_loads
    counts = "".join(
        f" {count:.2f} | {count / base:.2f} |"
        for count, base in zip(_counts(fmt, head_dim, group), baseline, strict=True)
    )
    return f"| {pair.name} | {head_dim} | {group} | {used.registers} | {plan.shared_bytes} | {spilled} |{counts}"


def _counts(fmt: str, head_dim: int, group: int) -> tuple[float, float]:
    pair = resolve_kv_format(fmt)
    compiled = compile_kernel(DecodePlan(pair.k, pair.v, head_dim, group, 16).decode_source())
    k, v = inner_loops(compiled, group)
    return instructions_per_element(k, group), instructions_per_element(v, group)


def main() -> None:
    head_dims = [int(argument) for argument in sys.argv[1:]] or [128]
    print(f"{REFERENCE_ARCH}, NVRTC {'.'.join(map(str, version()))}, block size 16\n\n{_HEADER}")
    for head_dim in head_dims:
        for group in GROUPS:
            baseline = _counts("fp16", head_dim, group)
            for fmt in FORMATS:
                print(_row(fmt, head_dim, group, baseline))


if __name__ == "__main__":
    main()
