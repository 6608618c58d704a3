"""Norms and the gated activation against plain torch."""

import pytest
import torch
from kernel_harness import close, random

from deepinfer.kernels.elementwise import (
    add_rms_norm,
    argmax,
    reference_rms_norm,
    reference_silu_mul,
    rms_norm,
    silu_mul,
)


def test_argmax_gives_the_lowest_id_of_the_highest_and_minus_one_for_rows_that_are_not_finite():
    for vocab, num_valid in ((49152, 49152), (49152, 49100), (300, 299), (16, 16), (15, 7), (1, 1)):
        logits = torch.randint(-9, 9, (9, vocab), generator=torch.Generator().manual_seed(vocab)).float()
        logits[0] = random(vocab)
        logits[1, num_valid - 1] = 100.0
        logits[2, 0] = 100.0
        logits[3] = -5.0
        logits[4:7, num_valid // 2] = torch.tensor([float("nan"), float("inf"), float("-inf")])
        logits[7, num_valid:] = 1e9
        finite = [bool(row[:num_valid].isfinite().all()) for row in logits]
        ids = logits[:, :num_valid].numpy().argmax(axis=1)  # numpy gives the first of several.
        assert argmax(logits, num_valid).tolist() == [
            int(i) if whole else -1 for i, whole in zip(ids, finite, strict=True)
        ]
    with pytest.raises(ValueError, match="301 of them valid"):
        argmax(torch.zeros(1, 300), 301)


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 48), (200, 576), (4, 40)])
def test_norms_agree_with_torch(dtype, shape):
    x, weight, delta = 3 * random(*shape), random(shape[1], seed=1), random(*shape, seed=2).to(dtype)
    out, residual = torch.empty(shape, dtype=dtype), x.clone()
    rms_norm(x, weight, 1e-5, out)
    assert close(out, reference_rms_norm(x, weight, 1e-5), dtype)
    add_rms_norm(residual, delta, weight, 1e-5, out)
    assert torch.equal(residual, x + delta)
    assert close(out, reference_rms_norm(residual, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1536), (3, 48), (100, 1536), (4, 40)])
def test_the_gated_activation_agrees_with_torch(dtype, shape):
    gate_up = (8 * random(shape[0], 2 * shape[1])).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -200.0, 200.0, -80.0])
    out = torch.empty(shape, dtype=dtype)
    silu_mul(gate_up, out)
    assert close(out, reference_silu_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_bit_equal_in_any_batch(dtype):
    x, weight, delta = random(300, 576), random(576, seed=1), random(300, 576, seed=2).to(dtype)
    gate_up = random(300, 1152, seed=3).to(dtype)
    whole, single = torch.empty(300, 576, dtype=dtype), torch.empty(300, 576, dtype=dtype)
    residual = x.clone()
    add_rms_norm(residual, delta, weight, 1e-5, whole)
    for row in range(300):
        add_rms_norm(x[row : row + 1], delta[row : row + 1], weight, 1e-5, single[row : row + 1])
    assert torch.equal(whole, single)
    assert torch.equal(residual, x)
    silu_mul(gate_up, whole)
    for row in range(300):
        silu_mul(gate_up[row : row + 1], single[row : row + 1])
    assert torch.equal(whole, single)


def test_nan_stays_in_its_row():
    x, out = random(3, 64), torch.empty(3, 64, dtype=torch.bfloat16)
    x[1, 5] = torch.nan
    rms_norm(x, torch.ones(64), 1e-5, out)
    assert torch.isnan(out).any(dim=1).tolist() == [False, True, False]


def test_tensors_that_do_not_fit_are_refused():
    x, weight = torch.zeros(2, 64), torch.ones(64)
    with pytest.raises(ValueError, match="do not fit"):
        rms_norm(x, weight[:32], 1e-5, torch.empty(2, 64))
    with pytest.raises(ValueError, match="need fp32 x"):
        rms_norm(x, weight, 1e-5, torch.empty(2, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match="must be as out"):
        add_rms_norm(x, torch.zeros(2, 64, dtype=torch.bfloat16), weight, 1e-5, torch.empty(2, 64))
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(torch.zeros(64, 2).t(), weight, 1e-5, torch.empty(2, 64))
    with pytest.raises(ValueError, match="does not fit out"):
        silu_mul(torch.zeros(2, 100), torch.empty(2, 64))
