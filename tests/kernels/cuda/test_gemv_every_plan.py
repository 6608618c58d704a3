"""Every specialisation of the GEMV is executed: all forms of weights, all plans, all activations."""

import pytest
import torch
from w4_harness import Case

from deepinfer.kernels.cuda.linear import CudaTiledDenseLinear, CudaW8A16Linear

FORMS = (*((4, size, minima) for size in (32, 64, 128) for minima in (True, False)), (8, 32, True), (16, 32, True))
"""Bits, group size, minima."""
SHAPES = ((20, 128), (2048, 128), (20, 1024), (2048, 1024))
"""Outputs and inputs: the four combinations of a CTA's warps and tiles."""


def with_weights(bits, case, backend, dtype):
    """(a linear form with fp32 results, its weights in float64)."""
    if bits == 4:
        return case.linear(backend, out_dtype=torch.float32), case.weights.double()
    if bits == 8:
        codes, scales = case.codes.to(torch.int8) - 8, case.scales
        grouped = codes.double().unflatten(1, (-1, 32)) * scales.double().unsqueeze(-1)
        return CudaW8A16Linear(backend, codes, scales, case.bias, torch.float32), grouped.flatten(1)
    weights = case.weights.to(dtype)
    return CudaTiledDenseLinear(backend, weights, case.bias, torch.float32), weights.double()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_specialisation_gives_the_right_product(backend, form, shape):
    bits, group_size, minima = form
    for dtype in (torch.bfloat16, torch.float16):
        case = Case(*shape, group_size, minima, dtype=dtype)
        linear, weights = with_weights(bits, case, backend, dtype)
        for rows in (1, 9):
            x = case.x(rows)
            expected = x.double() @ weights.T + case.bias.double()
            sums = x.double().abs() @ weights.abs().T + 1.0
            assert ((linear(x).double() - expected).abs() <= 2.0**-20 * sums).all()
