"""Random 4-bit weights, the CUDA linear form made of them, and their products in float64."""

from __future__ import annotations

import torch

from deepinfer.kernels.cuda.linear import CudaW4A16Linear


class Case:
    """Weights whose scales and minima are fp16 numbers, so that storing them changes nothing."""

    def __init__(self, outputs, inputs, group_size=32, minima=True, bias=True, dtype=torch.float16, seed=0, unit=1.0):
        self.generator = torch.Generator().manual_seed(seed)
        shape = outputs, inputs // group_size
        self.codes = torch.randint(0, 16, (outputs, inputs), generator=self.generator, dtype=torch.uint8)
        self.scales = (self.random(*shape).abs() * 0.02 + 0.001).half().float() * unit
        self.minima = (-self.random(*shape).abs() * 0.15).half().float() * unit if minima else -8.0 * self.scales
        self.bias = self.random(outputs) if bias else None
        self.group_size, self.dtype = group_size, dtype

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def x(self, rows):
        return self.random(rows, self.codes.shape[1]).to(self.dtype)

    def linear(self, backend, batch_invariant=False, out_dtype=None):
        weights = self.codes, self.scales, self.minima, self.bias
        return CudaW4A16Linear(backend, *weights, self.group_size, batch_invariant, out_dtype)

    @property
    def weights(self):
        """fp32 [M, K]: code times scale is exact, the sum is rounded once."""
        grouped = self.codes.float().unflatten(1, (-1, self.group_size))
        return (grouped * self.scales.unsqueeze(-1) + self.minima.unsqueeze(-1)).flatten(1)

    def product(self, x):
        y = x.double() @ self.weights.double().T
        return y if self.bias is None else y + self.bias.double()

    def scale_of_sums(self, x):
        """[N, M]: the sums of absolute products, to which rounding errors are proportional."""
        return x.double().abs() @ self.weights.double().abs().T + 1.0
