"""Matmul forms over packed weights: one kernel for every row count."""

from __future__ import annotations

import numba
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.cpu import amx, bf16_dot
from deepinfer.kernels.cpu.activation_forms import A_BF16, A_FP32, A_INT8, A_INT16, CHUNK, INTEGERS
from deepinfer.kernels.cpu.amx_matmul import MOST_ROWS, matmul_unit
from deepinfer.kernels.cpu.packed_matmul import ROW_TILE, form_for, packed_units
from deepinfer.kernels.cpu.records import BLOCK, P_BF16, P_INT4, P_INT8, record_bytes
from deepinfer.kernels.cpu.repack import WORTH_WAKING, fit_half, pack_records
from deepinfer.kernels.cpu.tasks import Task, recorder, refuse_recording, run_tasks
from deepinfer.kernels.packing import Stored, pack_stored
from deepinfer.kernels.stored_rows import StoredRows
from deepinfer.kernels.stored_words import StoredWords

KINDS = {
    (P_INT4, A_BF16): "w4a16 bf16 dot",
    (P_INT8, A_BF16): "w8a16 bf16 dot",
    (P_BF16, A_BF16): "dense bf16 dot",
    (P_INT4, A_INT8): "w4a8 int8 dot",
    (P_INT4, A_INT16): "w4a16 int16 dot",
    (P_INT8, A_INT16): "w8a16 int16 dot",
    (P_BF16, A_FP32): "dense bf16 fma",
}
TILE_KINDS = {P_INT4: "w4a16 bf16 AMX", P_INT8: "w8a16 bf16 AMX", P_BF16: "dense bf16 AMX"}
"""By matrix tiles."""
GROUPS = (32, 64, 128, 256)
UNITS_OF_WORKER = 8
"""Pieces of a matmul for each thread: enough to even out their speeds, few enough to cost nothing."""
COPY_ROWS, ROUND_ROWS = 16, 64
"""More rows than this meet 4-bit weights rounded to bf16, where that is asked for: by a copy of them, or, where the
processor has matrix tiles, rounded tile by tile."""
_CONVERTED = {A_INT8: torch.int8, A_INT16: torch.int16, A_FP32: torch.float32}


def rounds_tiles() -> bool:
    """Whether rounding 4-bit weights to bf16 for many rows takes no memory here."""
    return bf16_dot.available() and amx.available()


class PackedLinear:
    """y = x W^T + bias for bf16 x, summed in fp32. Codes are exact, scales and minima are kept in fp16 where that is
    exact and in fp32 where it is not. Nothing is rounded but x and y; on processors without bf16 dot products, where x
    meets 4-bit and 8-bit codes as 16-bit integers, also what is less than 1/128 of the largest in its 32 of a row
    (`cpu.activation_forms`). Rows are bit-equal for every row count.

    Args:
        kind: P_INT4, P_INT8 or P_BF16 of `cpu.records`.
        codes: [M, K], uint8 0 .. 15, int8, or bf16; or weights of files, with their groups, scales and minima, which
            are packed before `packing.gathered` ends. scales: [M, K / group] but for bf16. minima: the same for 4 bits.
        bias: [M] or None. group: k that share a scale; 32, 64, 128 or 256.
        out_dtype: of y, bf16 or fp32.
        rounded: more than `COPY_ROWS` rows (by tiles `ROUND_ROWS`) meet 4-bit weights rounded to bf16, and are not
            bit-equal to few.
        int8_activations: x is rounded to 8 bits, each 32 of a row by a step of their own, to meet 4-bit weights.
    """

    def __init__(
        self,
        kind: int,
        codes: Tensor | Stored,
        scales: Tensor | None = None,
        minima: Tensor | None = None,
        bias: Tensor | None = None,
        group: int = CHUNK,
        out_dtype: torch.dtype = torch.bfloat16,
        rounded: bool = False,
        int8_activations: bool = False,
    ) -> None:
        if int8_activations and kind != P_INT4:
            raise ValueError("activations are rounded to 8 bits for 4-bit weights only")
        if bias is not None and bias.shape != codes.shape[:1]:
            raise ValueError(f"bias {tuple(bias.shape)} does not fit weights {tuple(codes.shape)}")
        group = group if isinstance(codes, Tensor) else codes.group
        self._form = form_for(kind, int8_activations)
        self._by_tiles = by_tiles = self._form == A_BF16 and amx.available()
        self.kind = TILE_KINDS[kind] if by_tiles else KINDS[kind, self._form]
        self._outputs, self._width = codes.shape
        self._out_dtype, self._rounded = out_dtype, rounded
        self._number, self._group = kind, group
        self._row_tile = MOST_ROWS if by_tiles else ROW_TILE
        self._blocks, self._groups = -(-self._outputs // BLOCK), -(-self._width // group)
        self._padded_width = self._groups * group
        if rounded:
            self.kind += " + rounded to bf16" if by_tiles else " + bf16 copy"
        self._copy: Tensor | None = None
        if isinstance(codes, StoredRows | StoredWords):
            pack_stored(codes, kind, self._take)
        else:
            factors = [part.float().contiguous() for part in (scales, minima) if part is not None]
            _check(kind, codes, factors, group)
            codes = codes.contiguous()
            addresses = [part.data_ptr() for part in factors]
            wide = not all(fit_half(part.data_ptr(), part.numel()) for part in factors)
            records = torch.empty((self._blocks, self._groups, record_bytes(kind, group, wide)), dtype=torch.uint8)
            pack_records(kind, group, wide, codes.data_ptr(), addresses, records.data_ptr(), *codes.shape)
            self._take(records, wide)
        self._bias = torch.zeros(self._blocks * BLOCK)
        if bias is not None:
            self._bias[: self._outputs] = bias

    def _take(self, records: Tensor, wide: bool) -> None:
        """The weights in their order, and the kernels that read them so."""
        self._records, self._wide = records, wide
        is_bf16 = self._out_dtype == torch.bfloat16
        self._units = packed_units(self._number, self._form, self._group, wide, is_bf16, self._by_tiles)
        self._rounding_unit = 0
        if self._rounded and self._by_tiles:
            self._rounding_unit = matmul_unit(self._number, self._group, wide, is_bf16, True)
        elif self._rounded:
            self._copy = self.rows(torch.arange(self._outputs, dtype=torch.int32)).bfloat16()

    @property
    def weight_bytes(self) -> int:
        return self.step_bytes + (self._copy.nbytes if self._copy is not None else 0)

    @property
    def step_bytes(self) -> int:
        return self._records.nbytes + self._bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x bf16 [N, K] to [N, M] of `out_dtype`, contiguous."""
        rows, width = x.shape
        if width != self._width or x.dtype != torch.bfloat16:
            raise ValueError(f"x must be bf16 with {self._width} columns, not {x.dtype} with {width}")
        if self._copy is not None and rows > COPY_ROWS:
            refuse_recording("the bf16 copy of 4-bit weights")
            return F.linear(x, self._copy, self._bias[: self._outputs].bfloat16()).to(self._out_dtype)
        if width != self._padded_width or not x.is_contiguous():
            refuse_recording(f"an input of {width} columns to a {self.kind} matmul")
            x = F.pad(x, (0, self._padded_width - width))
        x = x.contiguous()
        y = torch.empty((rows, self._blocks * BLOCK), dtype=self._out_dtype)
        workers = numba.get_num_threads()
        read, sums, tasks = x, self._bias, []
        unit = self._units.matmul
        if self._rounding_unit and rows > ROUND_ROWS:
            unit = self._rounding_unit
        elif self._form != A_BF16:
            if self._form in INTEGERS:
                sums = torch.empty((rows, self._groups + self._padded_width // CHUNK))
            read = torch.empty((rows, self._padded_width), dtype=_CONVERTED[self._form])
            arguments = (x.data_ptr(), sums.data_ptr(), self._groups, read.data_ptr())
            tasks.append(Task(self._units.convert, rows, arguments))
        elif self._number == P_INT4:
            sums = torch.empty((rows, self._groups))
            if self._by_tiles:
                # What belongs to no row is read as well: it must not be subnormal, which is slow.
                sums = torch.zeros((self._groups, -(-rows // amx.ROWS) * amx.ROWS))
            arguments = (x.data_ptr(), sums.data_ptr(), self._groups, rows)
            tasks.append(Task(self._units.sums, rows, arguments))
        share = max(1, self._blocks // (UNITS_OF_WORKER * workers))
        units = -(-self._blocks // share)
        addresses = [part.data_ptr() for part in (read, self._records, self._bias, sums, y)]
        numbers = (rows, self._blocks, self._groups, share, units)
        tasks.append(Task(unit, units * -(-rows // self._row_tile), (*addresses, *numbers)))
        run_tasks(tasks, workers, x, read, sums, y)
        return y if y.shape[1] == self._outputs else _without_padding(y, self._outputs)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of W, as `linear.RowTable` has it. While a step is recorded, `ids` are int32 and contiguous: the replay
        reads them where they lie."""
        if ids.dtype != torch.int32 or not ids.is_contiguous():
            refuse_recording("ids that are not contiguous int32")
        ids = ids.int().contiguous()
        if recorder() is None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._outputs:
            raise IndexError(f"ids {int(ids.min())} .. {int(ids.max())} are outside 0 .. {self._outputs - 1}")
        out = torch.empty(len(ids), self._width)
        addresses = [part.data_ptr() for part in (ids, self._records, out)]
        task = Task(self._units.rows, len(ids), (*addresses, self._groups, self._width))
        few = recorder() is None and out.numel() < WORTH_WAKING
        run_tasks([task], 1 if few else numba.get_num_threads(), ids, out)
        return out


def _without_padding(y: Tensor, outputs: int) -> Tensor:
    kept, taker = y[:, :outputs].contiguous(), recorder()
    if taker is not None:
        taker.call(lambda: kept.copy_(y[:, :outputs]))
    return kept


def _check(kind: int, codes: Tensor, factors: list[Tensor], group: int) -> None:
    outputs, width = codes.shape
    name, dtype, count = (
        ("4-bit weights", torch.uint8, 2),
        ("8-bit weights", torch.int8, 1),
        ("bf16 weights", torch.bfloat16, 0),
    )[kind]
    if codes.dtype != dtype:
        raise ValueError(f"codes of {name} must be {dtype}, not {codes.dtype}")
    if not outputs:
        raise ValueError("weights without rows")
    if group not in GROUPS or (factors and width % group):
        raise ValueError(f"group_size must be 32, 64, 128 or 256 and divide {width}, not {group}")
    if len(factors) != count or any(part.shape != (outputs, width // group) for part in factors):
        shapes = [tuple(part.shape) for part in factors]
        raise ValueError(f"scales and minima of {name} must be {count} of {(outputs, width // group)}, not {shapes}")
