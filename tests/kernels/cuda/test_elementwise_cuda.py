"""Norms, the gated activation and the greedy choice of the CUDA path against plain torch."""

import pytest
import torch
from cuda_harness import close
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import random

from deepinfer.kernels.cuda.elementwise import (
    MAX_NORM_WIDTH,
    CudaElementwise,
    argmax_source,
    norm_source,
    silu_source,
)
from deepinfer.kernels.cuda.nvrtc import compile_kernel
from deepinfer.kernels.elementwise import reference_rms_norm, reference_silu_mul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


@pytest.fixture(scope="module")
def rows_of(backend):
    return CudaElementwise(backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4), (3, 576), (2, 1028), (1, 4096)])
def test_norms_agree_with_torch(rows_of, dtype, shape):
    x, weight, delta = 3 * random(*shape), random(shape[1], seed=1), random(*shape, seed=2).to(dtype)
    out, residual = torch.empty(shape, dtype=dtype), x.clone()
    rows_of.rms_norm(x, weight, EPS, out)
    assert close(out, reference_rms_norm(x, weight, EPS))
    rows_of.add_rms_norm(residual, delta, weight, EPS, out)
    assert torch.equal(residual, x + delta)
    assert close(out, reference_rms_norm(residual, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4), (3, 1536), (5, 1028)])
def test_the_gated_activation_agrees_with_torch(rows_of, dtype, shape):
    gate_up = (8 * random(shape[0], 2 * shape[1])).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -200.0, 200.0, -80.0])
    out = torch.empty(shape, dtype=dtype)
    rows_of.silu_mul(gate_up, out)
    assert close(out, reference_silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_bit_equal_in_any_batch_and_nothing_else_is_written(rows_of, dtype):
    x, weight, delta = random(6, 576), random(576, seed=1), random(6, 576, seed=2).to(dtype)
    gate_up = random(6, 1152, seed=3).to(dtype)
    whole, part = torch.empty(6, 576, dtype=dtype), torch.full((6, 576), 7.0, dtype=dtype)
    residual = x.clone()
    rows_of.add_rms_norm(residual, delta, weight, EPS, whole)
    rows_of.add_rms_norm(x[2:4], delta[2:4], weight, EPS, part[2:4])
    assert torch.equal(whole[2:4], part[2:4])
    assert torch.equal(residual[2:4], x[2:4])
    rows_of.silu_mul(gate_up, whole)
    rows_of.silu_mul(gate_up[2:4], part[2:4])
    assert torch.equal(whole[2:4], part[2:4])
    assert (part[:2] == 7.0).all()
    assert (part[4:] == 7.0).all()


def test_nan_stays_in_its_row(rows_of):
    x, out = random(3, 64), torch.empty(3, 64, dtype=torch.bfloat16)
    x[1, 5] = torch.nan
    rows_of.rms_norm(x, torch.ones(64), EPS, out)
    assert torch.isnan(out).any(dim=1).tolist() == [False, True, False]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(vocab=st.integers(1, 5000), padding=st.integers(0, 9), levels=st.integers(1, 50), seed=st.integers(0, 1000))
def test_the_greedy_choice_is_the_lowest_id_among_the_highest(rows_of, vocab, padding, levels, seed):
    logits = torch.full((3, vocab + padding), torch.nan)
    logits[:, :vocab] = (random(3, vocab, seed=seed) * levels).round()
    logits[1, : vocab // 2] = -torch.inf
    expected = [int((row == row.max()).nonzero()[0]) for row in logits[:, :vocab]]
    assert rows_of.argmax(logits, vocab).tolist() == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_logits_that_are_not_finite_has_no_choice(rows_of, bad):
    logits = random(4, 3000)
    expected = logits.argmax(dim=1).tolist()
    logits[1, 2999], logits[2, 1030] = bad, -torch.inf
    logits[3] = -torch.inf
    assert rows_of.argmax(logits, 3000).tolist() == [expected[0], -1, expected[2], -1]


def test_tensors_that_do_not_fit_are_refused(rows_of):
    x, weight = torch.zeros(2, 64), torch.ones(64)
    with pytest.raises(ValueError, match="do not fit"):
        rows_of.rms_norm(x, weight[:32], EPS, torch.empty(2, 64))
    with pytest.raises(ValueError, match="need fp32 x"):
        rows_of.rms_norm(x.half(), weight, EPS, torch.empty(2, 64))
    with pytest.raises(ValueError, match="multiples of 4"):
        rows_of.rms_norm(torch.zeros(2, 30), torch.ones(30), EPS, torch.empty(2, 30))
    with pytest.raises(ValueError, match="must be as out"):
        rows_of.add_rms_norm(x, torch.zeros(2, 64, dtype=torch.bfloat16), weight, EPS, torch.empty(2, 64))
    with pytest.raises(ValueError, match="contiguous"):
        rows_of.rms_norm(torch.zeros(64, 2).t(), weight, EPS, torch.empty(2, 64))
    with pytest.raises(ValueError, match="does not fit out"):
        rows_of.silu_mul(torch.zeros(2, 100), torch.empty(2, 64))
    with pytest.raises(ValueError, match="need fp32"):
        rows_of.argmax(torch.zeros(2, 100), 101)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_compile_for_sm_86_without_spills(dtype):
    norms = [norm_source(add, dtype, width) for add in (False, True) for width in (1024, 4096, MAX_NORM_WIDTH)]
    for source in (*norms, silu_source(dtype), argmax_source()):
        used = compile_kernel(source).resources
        assert (used.spill_stores, used.spill_loads, used.stack_bytes) == (0, 0, 0), f"{source}: {used}"
        assert used.registers <= 128, f"{source}: {used}"
