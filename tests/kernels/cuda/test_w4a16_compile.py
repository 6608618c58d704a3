"""Every specialisation of the GEMV and of the dequantiser that ships compiles for sm_86 and spills nothing."""

import itertools

import pytest
import torch
from sweep import check, compile_all

from deepinfer.kernels.cuda.gemv_plan import dequant_source, gemv_source, plan_gemv
from deepinfer.kernels.cuda.nvrtc import compile_kernel
from deepinfer.kernels.cuda.weight_tiles import W4_GROUP_SIZES, WeightTiles

DTYPES = (torch.bfloat16, torch.float16)
FORMS = (*((4, size, minima) for size in W4_GROUP_SIZES for minima in range(4)), (8, 32, False), (16, 64, False))
"""Bits, group size, minima."""
SHAPES = tuple(itertools.product((2, 16), (2, 128)))
"""Input tiles and output tiles: all plans."""
ROWS = (8, 16)


def tiles(form, input_tiles, output_tiles):
    codes = torch.empty(output_tiles, input_tiles, 1, device="meta")
    return WeightTiles(codes, codes, output_tiles * 16, input_tiles * 64, *form)


def gemv_sources(form, rows):
    """All plans, both kinds of activations, results and bias in turn; with zeros and in the wide form the kinds of
    activations take turns too."""
    for index, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES)):
        if form[2] > 1 and (index + index // 2) % 2:
            continue
        weights = tiles(form, *shape)
        out_dtype = dtype if index % 3 else torch.float32
        yield gemv_source(plan_gemv(weights, rows), weights, dtype, out_dtype, bool(index % 2))


def dequant_sources(form):
    return [dequant_source(tiles(form, 2, 2), dtype) for dtype in DTYPES]


@pytest.fixture(scope="session")
def compiled():
    """Everything that ships, each compiled once."""
    sources = [source for form in FORMS for rows in ROWS for source in gemv_sources(form, rows)]
    return compile_all(sources + [source for form in FORMS[:12] for source in dequant_sources(form)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_gemv_compiles_without_spills(compiled, form, rows):
    for source in gemv_sources(form, rows):
        check(source, compiled[source], 128)
    assert all(plan_gemv(tiles(form, *shape), rows).shared_bytes <= 48 * 1024 for shape in SHAPES)


@pytest.mark.parametrize("form", FORMS[:12])
def test_the_dequantiser_compiles_without_spills(compiled, form):
    for source in dequant_sources(form):
        check(source, compiled[source], 64)


def test_the_ptx_of_the_gemv_is_made_for_compute_86_and_multiplies_on_the_tensor_cores():
    weights = tiles(FORMS[0], 16, 128)
    ptx = compile_kernel(gemv_source(plan_gemv(weights, 1), weights, *DTYPES, True), "compute_86").ptx
    assert b".target sm_86" in ptx
    assert b"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx


@pytest.mark.parametrize("form", FORMS)
def test_the_sums_of_a_row_are_split_in_the_same_way_whatever_the_number_of_rows(form):
    for shape in itertools.product(range(1, 40), (2, 127, 128, 400)):
        weights = tiles(form, *shape)
        assert len({plan_gemv(weights, rows).warps for rows in range(1, 17)}) == 1
