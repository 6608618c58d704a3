"""No scale and no minimum of a 4-bit file is rounded on the CUDA path: one-hot activations give the weights back."""

import numpy as np
import pytest
import torch

from deepinfer.kernels.cuda.linear import CudaW4A16Linear
from deepinfer.kernels.cuda.weight_tiles import HALF_MINIMA, NO_MINIMA, WIDE, ZEROS
from deepinfer.stages.model.gguf_codes import READERS
from deepinfer.stages.model.int4 import Int4Groups

INPUTS, OUTPUTS = 512, 40


def gguf(name, elements, size, halves):
    """Random blocks whose scales, at the half words `halves`, are ordinary numbers."""
    random = np.random.default_rng(size)
    raw = random.integers(0, 256, (OUTPUTS, INPUTS // elements, size), dtype=np.uint8)
    for place in halves:
        scales = (random.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
        raw[..., 2 * place : 2 * place + 2] = scales[..., None].view(np.uint8)
    return READERS[name](raw.reshape(OUTPUTS, -1))


def with_zeros():
    """As AWQ and GPTQ have it: 16-bit scales and whole zeros for groups of 128."""
    random = np.random.default_rng(1)
    codes = random.integers(0, 16, (OUTPUTS, INPUTS), dtype=np.uint8)
    scales = np.abs(random.standard_normal((OUTPUTS, INPUTS // 128)) * 0.01).astype(np.float16).astype(np.float32)
    zeros = random.integers(0, 17, scales.shape).astype(np.float32)
    return Int4Groups(codes, scales, -scales * zeros)


CASES = {
    "Q4_0": (lambda: gguf("Q4_0", 32, 18, (0,)), NO_MINIMA),
    "Q4_1": (lambda: gguf("Q4_1", 32, 20, (0, 1)), HALF_MINIMA),
    "Q4_K": (lambda: gguf("Q4_K", 256, 144, (0, 1)), WIDE),
    "zeros": (with_zeros, ZEROS),
}


def parts_of(groups):
    return [torch.from_numpy(part) for part in (groups.codes, groups.scales, groups.minima)]


@pytest.mark.parametrize("name", CASES)
def test_every_weight_of_a_4_bit_file_is_multiplied_as_it_is(backend, name):
    make, kept = CASES[name]
    groups = make()
    four = parts_of(groups)
    linear = CudaW4A16Linear(backend, *four, None, groups.group, True, torch.float32)
    assert linear.tiles.minima == kept
    weights = torch.from_numpy(groups.dense())
    ones = torch.eye(INPUTS, dtype=torch.bfloat16)[::32].contiguous()
    assert torch.equal(linear(ones), weights.T[::32])
    dense = linear.dequantise(torch.empty(48, INPUTS, dtype=torch.bfloat16), 0)
    error = (dense[:OUTPUTS].float() - weights).abs()
    assert (error <= 2.0**-8 * weights.abs() + 1e-9).all()


def test_the_wide_form_costs_four_bytes_a_group_more(backend):
    groups = CASES["Q4_K"][0]()
    four = parts_of(groups)
    linear = CudaW4A16Linear(backend, *four, None, 32, True)
    padded = -(-OUTPUTS // 32) * 32
    assert linear.weight_bytes == padded * INPUTS // 2 + 8 * padded * INPUTS // 32
