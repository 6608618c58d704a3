"""Matmul forms: agreement with torch, and rows that do not depend on the batch."""

import pytest
import torch
import torch.nn.functional as F
from matmul_cases import assert_rows_do_not_depend_on_the_batch, quantised_int4, quantised_int8, random

from deepinfer.kernels.linear import DenseLinear, W4A16Linear, W8A16Linear, dequantise

SHAPES = [(576, 576), (3072, 576), (576, 1536), (32, 48), (20, 40), (1000, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 21])
def test_dense_fp32_agrees_with_float64(shape, invariant, rows):
    weight, x, bias = random(*shape), random(rows, shape[1], seed=1), random(shape[0], seed=2)
    for offset in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        y = DenseLinear(weight, offset, invariant)(x)
        assert y.dtype == torch.float32
        assert y.is_contiguous()
        assert torch.allclose(y.double(), exact, atol=1e-5 * shape[1] ** 0.5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 5, 21])
def test_dense_bf16_is_the_exact_product_rounded(shape, invariant, rows):
    weight, x = random(*shape, dtype=torch.bfloat16), random(rows, shape[1], seed=1, dtype=torch.bfloat16)
    bias = random(shape[0], seed=2, dtype=torch.bfloat16)
    y = DenseLinear(weight, bias, invariant)(x)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.double(), exact, atol=1e-3, rtol=2.0**-8)


@pytest.mark.parametrize("shape", [(576, 576), (3072, 576), (576, 1536), (32, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_rows_are_bit_equal_in_any_batch(shape, dtype):
    linear = DenseLinear(random(*shape, dtype=dtype), None, batch_invariant=True)
    assert_rows_do_not_depend_on_the_batch(linear, random(70, shape[1], seed=1, dtype=dtype))


def test_rows_of_a_large_head_are_bit_equal_in_any_batch():
    linear = DenseLinear(random(49152, 576, dtype=torch.bfloat16), None, batch_invariant=True)
    x = random(9, 576, seed=1, dtype=torch.bfloat16)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(linear(x), alone)
    assert torch.equal(linear(x[2:5]), alone[2:5])


def test_a_bf16_head_can_give_fp32_logits():
    linear = DenseLinear(random(64, 96, dtype=torch.bfloat16), None, True, out_dtype=torch.float32)
    x = random(3, 96, seed=1, dtype=torch.bfloat16)
    exact = F.linear(x.double(), random(64, 96, dtype=torch.bfloat16).double())
    assert torch.allclose(linear(x).double(), exact, atol=1e-4)


@pytest.mark.parametrize("shape", [(576, 576), (20, 32), (1000, 64)])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 21])
def test_int8_weights_are_code_times_scale(shape, rows):
    codes, scales = quantised_int8(*shape)
    dense = (codes.double().unflatten(1, (-1, 32)) * scales.double().unsqueeze(-1)).flatten(1)
    x, bias = random(rows, shape[1], seed=2, dtype=torch.bfloat16), random(shape[0], seed=3)
    exact = F.linear(x.double(), dense, bias.double())
    y = W8A16Linear(codes, scales, bias, out_dtype=torch.float32)(x)
    assert torch.allclose(y.double(), exact, atol=1e-3 * shape[1] ** 0.5, rtol=1e-5)
    assert W8A16Linear(codes, scales, bias)(x).dtype == torch.bfloat16


def test_int8_rows_are_bit_equal_in_any_batch():
    linear = W8A16Linear(*quantised_int8(576, 576), None)
    assert_rows_do_not_depend_on_the_batch(linear, random(70, 576, seed=1, dtype=torch.bfloat16))


@pytest.mark.parametrize(("shape", "group"), [((576, 576), 32), ((64, 32), 32), ((128, 256), 128)])
@pytest.mark.parametrize(("invariant", "copy"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_int4_weights_are_scale_times_code_plus_minimum(shape, group, invariant, copy, rows):
    quantised = quantised_int4(*shape, group)
    x, bias = random(rows, shape[1], seed=1, dtype=torch.bfloat16), random(shape[0], dtype=torch.bfloat16)
    y = W4A16Linear(*quantised, bias, group, invariant, copy)(x)
    exact = F.linear(x.float(), dequantise(*quantised, group), bias.float())
    error = (y.float() - exact).norm() / exact.norm()
    assert y.dtype == torch.bfloat16
    assert error < 6e-3


@pytest.mark.parametrize("shape", [(576, 576), (3072, 576), (576, 1536), (64, 32)])
def test_int4_rows_are_bit_equal_in_any_batch_and_chunk(shape):
    linear = W4A16Linear(*quantised_int4(*shape, 32), None, 32, batch_invariant=True, bf16_prefill=True)
    x = random(300, shape[1], seed=1, dtype=torch.bfloat16)
    assert_rows_do_not_depend_on_the_batch(linear, x[:130])
    whole = linear(x)
    for chunk in (1, 7, 64, 128, 299):
        assert torch.equal(torch.cat([linear(part) for part in x.split(chunk)]), whole)


def test_rounding_scale_and_minimum_to_bf16_costs_little():
    """Relative RMS weight error of what the packed kernel multiplies by, found by multiplying the
    identity."""
    quantised = quantised_int4(576, 576, 32)
    linear = W4A16Linear(*quantised, None, 32, batch_invariant=True, bf16_prefill=False)
    dense = dequantise(*quantised, 32)
    multiplied = linear(torch.eye(576, dtype=torch.bfloat16)).float().t()
    relative = float((multiplied - dense).norm() / dense.norm())
    assert 1e-4 < relative < 4e-3


def test_only_the_copy_costs_memory_beyond_five_bits_a_weight():
    quantised = quantised_int4(576, 576, 32)
    packed = W4A16Linear(*quantised, None, 32, batch_invariant=False, bf16_prefill=False)
    copied = W4A16Linear(*quantised, None, 32, batch_invariant=False, bf16_prefill=True)
    assert packed.weight_bytes == 576 * 576 * 5 // 8
    assert copied.weight_bytes == packed.weight_bytes + 576 * 576 * 2
    assert (packed.kind, copied.kind) == ("w4a16 packed int4", "w4a16 packed int4 + bf16 copy")


@pytest.mark.parametrize(
    ("shape", "group", "message"),
    [((20, 32), 32, "divisible by 16, not 20"), ((32, 48), 32, "divide 48"), ((32, 48), 48, "not 48")],
)
def test_int4_shapes_without_a_kernel_are_refused(shape, group, message):
    codes, scales = torch.zeros(*shape, dtype=torch.uint8), torch.zeros(shape[0], shape[1] // group)
    with pytest.raises(ValueError, match=message):
        W4A16Linear(codes, scales, scales, None, group, True, False)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="x has 40 columns"):
        DenseLinear(random(32, 48), None, True)(random(1, 40))
    with pytest.raises(ValueError, match="bias"):
        DenseLinear(random(32, 48), random(31), True)
    with pytest.raises(ValueError, match="dense weights must be fp32 or bf16"):
        DenseLinear(random(32, 48, dtype=torch.float16), None, True)
    with pytest.raises(ValueError, match="scales"):
        W8A16Linear(torch.zeros(32, 48, dtype=torch.int8), torch.ones(32, 1), None)
