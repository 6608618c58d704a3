"""The codecs of the device, element by element, against the torch reference."""

import pytest
import torch

from deepinfer.kernels.codecs import BF16, FP8_E4M3, FP8_E5M2, FP16, INT8
from deepinfer.kernels.cuda.source import KernelSource
from deepinfer.kernels.reference_codecs import sanitize

DECODE = """#include "codecs.h"
extern "C" __global__ void KERNEL_NAME(float* out, float* poison, const u32* words) {
    typedef Decoder<PROBED> D;
    D::Memory memory;
    const int quad = blockIdx.x * 32 + threadIdx.x;
    D::decode4(words + quad * D::ITEM_BYTES, out + 4 * quad, memory);
    for (int i = 0; i < 4; ++i) {
        out[4 * quad + i] *= D::FACTOR;
        poison[4 * quad + i] = memory.poison(i);
    }
}"""
ENCODE = """#include "codecs.h"
extern "C" __global__ void KERNEL_NAME(u8* row, const float* in) {
    const int i = blockIdx.x * 32 + threadIdx.x;
    encode<PROBED>(in[i], 1.0f, row, i);
}"""


@pytest.fixture
def probe(tmp_path, backend):
    def launch(text, codec, threads, *args):
        path = tmp_path / "probe.cu"
        path.write_text(text)
        kernel = backend.compile(KernelSource(str(path), "probe", (("PROBED", codec.number),)))
        backend.launch(kernel, (threads // 32, 1, 1), 32, 0, *args)

    return launch


def every_code(codec):
    """All codes: 256 of one byte, 65,536 of two."""
    if codec.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8)
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.uint8)


@pytest.mark.parametrize("codec", [BF16, FP16, INT8, FP8_E4M3, FP8_E5M2], ids=lambda codec: codec.name)
def test_every_code_decodes_exactly_with_its_sign(probe, codec):
    codes = every_code(codec)
    count = len(codes) // codec.itemsize
    got, poison = torch.empty(count), torch.empty(count)
    probe(DECODE, codec, count // 4, got, poison, codes)
    scales = torch.ones(1).half().expand(1) if codec.scaled else None
    expected = codec.decode(codes.view(1, -1), scales).flatten()
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(got + poison), nan)
    assert torch.equal(got[~nan], expected[~nan])
    assert torch.equal(torch.signbit(got[~nan]), torch.signbit(expected[~nan]))


def awkward_values():
    """Random, subnormal, the codes' own values and the middles between them, and their neighbours, of both signs."""
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(4096, generator=generator)
    spread = normal * torch.exp(15 * torch.randn(4096, generator=generator))
    exact = []
    for codec in (FP8_E4M3, FP8_E5M2, FP16, BF16):
        codes = every_code(codec)
        step = codes.view(-1, codec.itemsize)[:: 1 if codec.itemsize == 1 else 37].flatten()
        exact.append(codec.decode(step.view(1, -1), None).flatten())
    values = torch.cat(exact)
    values = values[torch.isfinite(values)].sort().values
    values = torch.cat((values, (values[1:] + values[:-1]) / 2, normal, spread, torch.tensor([0.0, -0.0, 1e-45])))
    values = torch.cat((values, torch.nextafter(values, values + 1), torch.nextafter(values, values - 1)))
    return values[: len(values) // 32 * 32]


@pytest.mark.parametrize("codec", [BF16, FP16, FP8_E4M3, FP8_E5M2], ids=lambda codec: codec.name)
def test_encoding_gives_the_bytes_of_the_reference(probe, codec):
    values, _, _ = sanitize(codec, awkward_values())
    row = torch.zeros(len(values) * codec.itemsize, dtype=torch.uint8)
    probe(ENCODE, codec, len(values), row, values)
    assert torch.equal(row, codec.encode(values.view(1, -1))[0].flatten())
