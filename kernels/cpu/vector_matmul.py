"""The matmul of `packed_matmul` on processors without bf16 dot products, for activations of every other form.

Many rows meet codes that were unpacked to 16 bits for all of them; few meet them as they lie. The sums are the same,
bit by bit.
"""

from __future__ import annotations

import functools

from numba import literally

from deepinfer.kernels.codecs import BF16, FP32
from deepinfer.kernels.cpu.activation_forms import A_INT16, CHUNK, FORM_BYTES
from deepinfer.kernels.cpu.amx import stack_memory
from deepinfer.kernels.cpu.amx_matmul import operands, share_of
from deepinfer.kernels.cpu.amx_products import store_output
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES
from deepinfer.kernels.cpu.jit import shared_helper
from deepinfer.kernels.cpu.packed_products import packed_products
from deepinfer.kernels.cpu.records import BLOCK, record_bytes
from deepinfer.kernels.cpu.tasks import unit
from deepinfer.kernels.cpu.vec16 import load_f32, store_f32
from deepinfer.kernels.cpu.weight_codes import unpack_records, words_of

ROW_TILE = 64
"""Rows that go through all blocks together: their activations stay in the second-level cache."""
_FEW = 8
"""Up to so many rows are multiplied with codes as they lie."""
_PIECE = 512
"""k whose codes are unpacked at a time: they stay in the first-level cache while the rows go by."""
_AT_ONCE = 4
"""Rows whose sums fill sixteen registers, with what they are multiplied with."""
_FP32 = FP32.number
_TOTALS_BYTES = (ROW_TILE + _AT_ONCE) * VECTOR_BYTES
_UNPACKED_BYTES = _PIECE // CHUNK * BLOCK * (2 * CHUNK + 2 * 4)


@shared_helper
def few_rows(
    kind, form, group, wide, out, x, x_stride, num_rows, sums, scales, sums_stride, w, groups, bias, y, y_stride
):  # type: ignore[no-untyped-def]
    """`num_rows` rows against sixteen outputs: four at a time, the rest as one, two or four."""
    literally(kind)
    literally(form)
    literally(group)
    literally(wide)
    literally(out)
    for row in range(0, num_rows, _AT_ONCE):
        left = num_rows - row
        x_at, y_at = x + row * x_stride, y + row * y_stride
        sums_at, scales_at = sums + row * sums_stride, scales + row * sums_stride
        if left > 2:
            packed_products(
                kind, form, group, wide, out, 4, x_at, x_stride, left - 1, sums_at, scales_at, sums_stride, w, groups,
                bias, 0, y_at, y_stride,
            )  # fmt: skip
        elif left > 1:
            packed_products(
                kind, form, group, wide, out, 2, x_at, x_stride, left - 1, sums_at, scales_at, sums_stride, w, groups,
                bias, 0, y_at, y_stride,
            )  # fmt: skip
        else:
            packed_products(
                kind, form, group, wide, out, 1, x_at, x_stride, left - 1, sums_at, scales_at, sums_stride, w, groups,
                bias, 0, y_at, y_stride,
            )  # fmt: skip


@shared_helper
def many_rows(  # type: ignore[no-untyped-def]
    kind, words_kind, group, wide, out, x, x_stride, num_rows, sums, scales, sums_stride, w, record, groups, bias,
    y, y_stride,
):  # fmt: skip
    """Up to `ROW_TILE` rows against sixteen outputs, by way of unpacked codes. record: bytes of one of w's."""
    literally(kind)
    literally(words_kind)
    literally(group)
    literally(wide)
    literally(out)
    totals, unpacked = stack_memory(_TOTALS_BYTES), stack_memory(_UNPACKED_BYTES)
    offsets = load_f32(bias)
    for row in range(num_rows):
        store_f32(totals + row * VECTOR_BYTES, offsets)
    step = _PIECE // group
    for first in range(0, groups, step):
        count = min(step, groups - first)
        unpack_records(kind, group, wide, w + first * record, count, unpacked)
        x_at, sums_at = x + 2 * group * first, sums + 4 * first
        scales_at = scales + 4 * (group // CHUNK) * first
        for row in range(0, num_rows, _AT_ONCE):
            total = totals + row * VECTOR_BYTES
            packed_products(
                words_kind, A_INT16, group, 1, _FP32, 4, x_at + row * x_stride, x_stride, num_rows - row - 1,
                sums_at + row * sums_stride, scales_at + row * sums_stride, sums_stride, unpacked, count,
                total, VECTOR_BYTES, total, VECTOR_BYTES,
            )  # fmt: skip
    for row in range(num_rows):
        store_output(out, y + row * y_stride, load_f32(totals + row * VECTOR_BYTES))


@functools.cache
def matmul_unit(kind: int, form: int, group: int, wide: bool, out_bf16: bool) -> int:
    """The address of `PackedUnits.matmul` for rows of a form, as `convert_unit` writes them."""
    if form == A_INT16:
        return _words_unit(kind, group, wide, out_bf16)
    record, is_wide = record_bytes(kind, group, wide), int(wide)
    out = BF16 if out_bf16 else FP32
    out_number, block_bytes, x_bytes = out.number, out.itemsize * BLOCK, FORM_BYTES[form]
    factors = 1 + group // CHUNK  # fp32 of a group: its sum, and the scales of its chunks

    @unit
    def matmul(arguments, index, worker):  # type: ignore[no-untyped-def]
        x, w, bias, sums, y, num_rows, num_blocks, groups = operands(arguments)
        row, first, end = share_of(arguments, index, ROW_TILE)
        x_stride, sums_stride, y_stride = x_bytes * group * groups, 4 * factors * groups, block_bytes * num_blocks
        x, sums, y = x + row * x_stride, sums + row * sums_stride, y + row * y_stride
        for block in range(first, end):
            few_rows(
                kind, form, group, is_wide, out_number, x, x_stride, min(num_rows - row, ROW_TILE), sums,
                sums + 4 * groups, sums_stride, w + block * record * groups, groups, bias + 4 * BLOCK * block,
                y + block * block_bytes, y_stride,
            )  # fmt: skip

    return matmul.address


def _words_unit(kind: int, group: int, wide: bool, out_bf16: bool) -> int:
    """For A_INT16."""
    record, is_wide = record_bytes(kind, group, wide), int(wide)
    out, words_kind = BF16 if out_bf16 else FP32, words_of(kind)
    out_number, block_bytes, form = out.number, out.itemsize * BLOCK, A_INT16
    factors = 1 + group // CHUNK

    @unit
    def matmul_of_words(arguments, index, worker):  # type: ignore[no-untyped-def]
        x, w, bias, sums, y, num_rows, num_blocks, groups = operands(arguments)
        row, first, end = share_of(arguments, index, ROW_TILE)
        rows, y_stride = min(num_rows - row, ROW_TILE), block_bytes * num_blocks
        x_stride, sums_stride = 2 * group * groups, 4 * factors * groups
        x, sums, y = x + row * x_stride, sums + row * sums_stride, y + row * y_stride
        for block in range(first, end):
            codes, offsets, y_at = w + block * record * groups, bias + 4 * BLOCK * block, y + block * block_bytes
            if rows <= _FEW:
                few_rows(
                    kind, form, group, is_wide, out_number, x, x_stride, rows, sums, sums + 4 * groups, sums_stride,
                    codes, groups, offsets, y_at, y_stride,
                )  # fmt: skip
            else:
                many_rows(
                    kind, words_kind, group, is_wide, out_number, x, x_stride, rows, sums, sums + 4 * groups,
                    sums_stride, codes, record, groups, offsets, y_at, y_stride,
                )  # fmt: skip

    return matmul_of_words.address
