"""The fp32 matmul: agreement with torch, and rows that do not depend on the batch."""

import pytest
import torch
import torch.nn.functional as F
from matmul_cases import assert_rows_do_not_depend_on_the_batch, random

from deepinfer.kernels.linear import DenseLinear

SHAPES = [(576, 576), (3072, 576), (576, 1536), (32, 48), (20, 40), (1000, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 21])
def test_the_product_agrees_with_float64(shape, rows):
    weight, x, bias = random(*shape), random(rows, shape[1], seed=1), random(shape[0], seed=2)
    for offset in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        y = DenseLinear(weight, offset)(x)
        assert y.dtype == torch.float32
        assert y.is_contiguous()
        assert torch.allclose(y.double(), exact, atol=1e-5 * shape[1] ** 0.5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(576, 576), (3072, 576), (576, 1536), (32, 48)])
def test_rows_are_bit_equal_in_any_batch(shape):
    assert_rows_do_not_depend_on_the_batch(DenseLinear(random(*shape), None), random(70, shape[1], seed=1))


def test_rows_of_a_large_head_are_bit_equal_in_any_batch():
    linear, x = DenseLinear(random(49152, 576), None), random(9, 576, seed=1)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(linear(x), alone)
    assert torch.equal(linear(x[2:5]), alone[2:5])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"x must be fp32 with 48 columns, not .* with 40"):
        DenseLinear(random(32, 48), None)(random(1, 40))
    with pytest.raises(ValueError, match=r"with 48 columns, not torch\.bfloat16"):
        DenseLinear(random(32, 48), None)(random(1, 48, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bias"):
        DenseLinear(random(32, 48), random(31))
    with pytest.raises(ValueError, match=r"dense weights must be fp32, not torch\.float16"):
        DenseLinear(random(32, 48, dtype=torch.float16), None)
