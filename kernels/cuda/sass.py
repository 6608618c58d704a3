"""Machine code of compiled kernels: which loops there are, and how many instructions they take for each element."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from deepinfer.kernels.cuda.nvrtc import CompileError

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


class Instruction(NamedTuple):
    """One instruction: byte address, opcode ("LDS.128"), and where it branches to, if it does."""

    address: int
    opcode: str
    target: int | None


class Loop(NamedTuple):
    """A loop that contains no other: its instructions from the first to the backward branch."""

    instructions: tuple[Instruction, ...]

    @property
    def opcodes(self) -> Counter[str]:
        """How often each opcode stands in the body, without its modifiers."""
        return Counter(instruction.opcode.split(".")[0] for instruction in self.instructions)


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin that holds one kernel.

    Raises CompileError without nvdisasm (of the package nvidia-cuda-nvdisasm), or when it fails.
    """
    lines = _nvdisasm(cubin).splitlines()
    found: list[tuple[int, str, str | None]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in lines:
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _INSTRUCTION.match(line):
            address, opcode, operands = int(match[1], 16), match[2], match[3]
            labels.update(dict.fromkeys(waiting, address))
            waiting.clear()
            target = _TARGET.search(operands) if opcode.startswith("BRA") else None
            found.append((address, opcode, target[1] if target else None))
    return [Instruction(address, opcode, labels.get(name) if name else None) for address, opcode, name in found]


def longest_loop(instructions: list[Instruction]) -> Loop:
    """By its backward branch. Raises ValueError if there is none."""
    first, last = max(_spans(instructions), key=lambda span: span[1] - span[0])
    return Loop(tuple(one for one in instructions if first <= one.address <= last))


def _spans(instructions: list[Instruction]) -> set[tuple[int, int]]:
    """First and last address of every loop."""
    return {
        (branch.target, branch.address)
        for branch in instructions
        if branch.target is not None and branch.target < branch.address
    }


def innermost_loops(instructions: list[Instruction]) -> list[Loop]:
    """Loops, by their backward branches, that contain no smaller one, in the order of the code."""
    spans = _spans(instructions)
    inner = [
        span
        for span in spans
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    ]
    return [Loop(tuple(one for one in instructions if first <= one.address <= last)) for first, last in sorted(inner)]


def _nvdisasm(cubin: bytes) -> str:
    program = _find_program()
    if program is None:
        raise CompileError("no disassembler: install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=False)
    if result.returncode:
        raise CompileError(f"nvdisasm failed: {result.stderr.strip()}")
    return result.stdout


def _find_program() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(folder).glob("*/bin/nvdisasm"))
        if found:
            return str(found[0])
    return shutil.which("nvdisasm")
