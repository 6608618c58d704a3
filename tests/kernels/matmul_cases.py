"""Random weights and activations, and the check that rows do not depend on their company."""

import torch

COUNTS = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 63, 64, 65)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantised_int8(rows, width):
    codes = torch.randint(-128, 128, (rows, width), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    return codes, random(rows, width // 32, seed=1).abs()


def quantised_int4(rows, width, group):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, width), dtype=torch.uint8, generator=generator)
    scales = 0.02 * torch.rand(rows, width // group, generator=generator) + 0.01
    return codes, scales, -7.5 * scales + 0.01 * torch.randn(rows, width // group, generator=generator)


def assert_rows_do_not_depend_on_the_batch(linear, x, counts=COUNTS):
    alone = torch.cat([linear(row[None]) for row in x])
    for count in (*counts, len(x)):
        assert torch.equal(linear(x[:count]), alone[:count])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(x[order]), alone[order])
    assert torch.equal(linear(x[11:30]), alone[11:30])
