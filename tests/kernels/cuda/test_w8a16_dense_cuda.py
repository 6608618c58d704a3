"""Matmuls of 8-bit and 16-bit weights on the CUDA path against float64, and the promises about their rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels.cuda.linear import CudaTiledDenseLinear, CudaW8A16Linear

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SUM_ERROR = 2.0**-20
"""Of fp32 sums, relative to the sum of absolute products."""


class Case:
    """Weights of 8 bits with scales that fp16 holds, or of 16 bits."""

    def __init__(self, bits, outputs, inputs, dtype, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.bits, self.dtype, self.bias = bits, dtype, self.random(outputs)
        if bits == 8:
            self.codes = torch.randint(-128, 128, (outputs, inputs), generator=self.generator, dtype=torch.int8)
            self.scales = (self.random(outputs, inputs // 32).abs() * 0.01).half().float()
            grouped = self.codes.double().unflatten(1, (-1, 32)) * self.scales.double().unsqueeze(-1)
            self.weights = grouped.flatten(1)
        else:
            self.stored = self.random(outputs, inputs).to(dtype)
            self.weights = self.stored.double()

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def x(self, rows):
        return self.random(rows, self.weights.shape[1]).to(self.dtype)

    def linear(self, backend, out_dtype=FP32):
        if self.bits == 8:
            return CudaW8A16Linear(backend, self.codes, self.scales, self.bias, out_dtype)
        return CudaTiledDenseLinear(backend, self.stored, self.bias, out_dtype)

    def check(self, x, y):
        expected = x.double() @ self.weights.T + self.bias.double()
        sums = x.double().abs() @ self.weights.abs().T + 1.0
        assert ((y.double() - expected).abs() <= SUM_ERROR * sums).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(83, 160, 3), (40, 1056, 11), (2080, 64, 2)])
def test_the_product_is_that_of_the_stored_weights(backend, bits, dtype, outputs, inputs, rows):
    case = Case(bits, outputs, inputs, dtype)
    x = case.x(rows)
    case.check(x, case.linear(backend)(x))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    bits=st.sampled_from([8, 16]),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 9),
    rows=st.integers(1, 16),
    seed=st.integers(0, 1000),
)
def test_any_shape_gives_the_right_product(backend, bits, outputs, groups, rows, seed):
    case = Case(bits, outputs, groups * 32, BF16, seed)
    x = case.x(rows)
    case.check(x, case.linear(backend)(x))


@pytest.mark.parametrize("bits", [8, 16])
def test_every_8_bit_code_and_every_kind_of_16_bit_number_is_multiplied_exactly(backend, bits):
    for dtype in (BF16, FP16):
        case = Case(bits, 32, 256, dtype)
        if bits == 8:
            case.codes[0] = torch.arange(-128, 128, dtype=torch.int8)
            case.scales[0], case.bias = 1.0, None
            expected = case.codes[0].double()
        else:
            case.stored[0, :4] = torch.tensor([2.0**-14, 3.0 * 2.0**-15, -(2.0**15), -0.0]).to(dtype)
            case.bias, expected = None, case.stored[0].double()
        linear, ones = case.linear(backend), torch.eye(256).to(dtype)
        assert torch.equal(linear(ones[:16])[:, 0].double(), expected[:16])
        assert torch.equal(linear(ones)[:, 0].double(), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bits", [8, 16])
def test_a_row_is_bit_equal_alone_and_in_every_batch(backend, bits, dtype):
    case = Case(bits, 48, 1056, dtype)
    linear, x = case.linear(backend), case.x(35)
    together = linear(x)
    assert torch.equal(together[::5], torch.cat([linear(x[row : row + 1]) for row in range(0, 35, 5)]))
    assert torch.equal(together[19:35], linear(x[19:35]))


@pytest.mark.parametrize("bits", [8, 16])
def test_memory_is_what_the_weights_take(backend, bits):
    weights = 64 * 256
    expected = weights + 2 * weights // 32 if bits == 8 else 2 * weights
    assert Case(bits, 64, 256, BF16).linear(backend).weight_bytes == expected + 4 * 64


def test_weights_that_do_not_fit_are_refused(backend):
    codes, scales = torch.zeros(32, 64, dtype=torch.int8), torch.ones(32, 2)
    with pytest.raises(ValueError, match="must be int8"):
        CudaW8A16Linear(backend, codes.int(), scales, None)
    with pytest.raises(ValueError, match="must be \\(32, 2\\) and finite"):
        CudaW8A16Linear(backend, codes, scales[:, :1], None)
    with pytest.raises(ValueError, match="do not divide"):
        CudaW8A16Linear(backend, codes[:, :40], scales, None)
    with pytest.raises(ValueError, match="bf16 or fp16"):
        CudaTiledDenseLinear(backend, torch.zeros(32, 64), None)
    with pytest.raises(ValueError, match="not with"):
        CudaTiledDenseLinear(backend, torch.zeros(32, 64, dtype=BF16), None)(torch.zeros(1, 64, dtype=FP16))
