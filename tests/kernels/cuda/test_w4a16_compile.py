"""Every specialisation of the 4-bit kernels that ships compiles for sm_86 and spills nothing."""

import itertools

import pytest
import torch

from deepinfer.kernels.cuda.nvrtc import compile_kernel
from deepinfer.kernels.cuda.w4_kernels import dequant_source, gemv_source, plan_gemv
from deepinfer.kernels.cuda.w4_tiles import GROUP_SIZES, W4Tiles

DTYPES = (torch.bfloat16, torch.float16)
SHAPES = tuple(itertools.product((2, 16), (2, 128)))
"""Input tiles and output tiles: all plans."""


def tiles(group_size, minima, input_tiles, output_tiles):
    codes = torch.empty(output_tiles, input_tiles, 1, 1, device="meta")
    return W4Tiles(codes, codes, 1.0, output_tiles * 16, input_tiles * 64, group_size, minima)


def check(source, registers):
    compiled = compile_kernel(source)
    assert source.name.encode() in compiled.ptx
    used = compiled.resources
    assert (used.spill_stores, used.spill_loads, used.stack_bytes) == (0, 0, 0), f"{source}: {used}"
    assert used.registers <= registers, f"{source}: {used}"


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("minima", [True, False])
@pytest.mark.parametrize("rows", [8, 16])
def test_the_gemv_compiles_without_spills(group_size, minima, rows):
    for index, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES)):
        weights = tiles(group_size, minima, *shape)
        plan = plan_gemv(weights, rows)
        assert plan.shared_bytes <= 48 * 1024
        out_dtype = dtype if index % 3 else torch.float32
        check(gemv_source(plan, weights, dtype, out_dtype, bool(index % 2)), 128)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("minima", [True, False])
def test_the_dequantiser_compiles_without_spills(group_size, minima):
    for dtype in DTYPES:
        check(dequant_source(tiles(group_size, minima, 2, 2), dtype), 64)


def test_the_ptx_of_the_gemv_is_made_for_compute_86_and_multiplies_on_the_tensor_cores():
    weights = tiles(32, True, 16, 128)
    ptx = compile_kernel(gemv_source(plan_gemv(weights, 1), weights, *DTYPES, True), "compute_86").ptx
    assert b".target sm_86" in ptx
    assert b"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx


def test_the_sums_of_a_row_are_split_in_the_same_way_whatever_the_number_of_rows():
    for shape in itertools.product(range(1, 40), (2, 127, 128, 400)):
        weights = tiles(64, True, *shape)
        assert len({plan_gemv(weights, rows).warps for rows in range(1, 17)}) == 1
