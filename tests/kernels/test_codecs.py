"""The codecs: bit facts, rounding, clamping, and the compiled form against the plain torch one."""

import numpy as np
import pytest
import torch
from kernel_harness import write_values

from deepinfer.kernels import CODECS, resolve_kv_format
from deepinfer.kernels.cpu.codecs import load16
from deepinfer.kernels.cpu.jit import compiled
from deepinfer.kernels.cpu.vec16 import store_f32

NAMES = [codec.name for codec in CODECS]


def codec(name):
    return resolve_kv_format(name).v


def fp8_value(code, mantissa_bits, bias):
    """The value of a finite code, from the definition of the format."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


E4M3_VALUES = torch.tensor([fp8_value(code, 3, 7) for code in range(256) if code & 0x7F != 0x7F])
E5M2_VALUES = torch.tensor([fp8_value(code, 2, 15) for code in range(256) if code & 0x7F < 0x7C])


def awkward_values(seed=0):
    """Random, subnormal, boundary, huge, zero of both signs, and the middle between neighbouring FP8
    values."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4096, generator=generator)
    spread = normal * torch.exp(20 * torch.randn(4096, generator=generator))
    tiny = normal * 2.0**-12
    limits = torch.tensor([1e-45, 2.0**-10, 2.0**-17, 448.0, 449.0, 464.0, 465.0, 57344.0, 61440.0, 65504.0, 65520.0])
    edges = torch.cat((limits, torch.tensor([3.3895e38, 3.4028e38, 0.0, 127.5, 1e30])))
    exact = torch.cat((E4M3_VALUES, E5M2_VALUES)).sort().values
    middles = (exact[1:] + exact[:-1]) / 2
    values = torch.cat((normal, spread, tiny, edges, -edges, exact, middles))
    beside = torch.cat((torch.nextafter(values, values + 1), torch.nextafter(values, values - 1)))
    values = torch.cat((values, beside))
    values = values[torch.isfinite(values)]
    return values[: len(values) // 16 * 16].view(-1, 16)


@compiled()
def decode_e4m3(source, target, count):
    for i in range(0, count, 16):
        store_f32(target + 4 * i, load16(4, source + i))


@compiled()
def decode_e5m2(source, target, count):
    for i in range(0, count, 16):
        store_f32(target + 4 * i, load16(5, source + i))


@pytest.mark.parametrize(
    ("name", "bits", "bias", "kernel"), [("fp8_e4m3", 3, 7, decode_e4m3), ("fp8_e5m2", 2, 15, decode_e5m2)]
)
def test_all_finite_fp8_codes_decode_exactly(name, bits, bias, kernel):
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) < (0x7F if bits == 3 else 0x7C)
    expected = torch.tensor([fp8_value(code, bits, bias) for code in range(256)])
    compiled_values = torch.empty(256)
    kernel(codes.data_ptr(), compiled_values.data_ptr(), 256)
    reference = codec(name).decode(codes, None)
    assert not torch.isfinite(reference[~finite]).any()
    for values in (reference, compiled_values):
        assert torch.equal(values[finite], expected[finite])
        assert torch.equal(torch.signbit(values[finite]), torch.signbit(expected[finite]))


@pytest.mark.parametrize(("name", "values"), [("fp8_e4m3", E4M3_VALUES), ("fp8_e5m2", E5M2_VALUES)])
def test_fp8_encoding_takes_the_nearest_value_and_the_even_one_of_two(name, values):
    x = awkward_values().flatten()
    codes, _ = codec(name).encode(x)
    stored = codec(name).decode(codes, None).double()
    clamped = x.double().clamp(-values.max().item(), values.max().item())
    nearest = (clamped[:, None] - values.double()[None]).abs().min(dim=1).values
    assert torch.equal((clamped - stored).abs(), nearest)
    ordered = values[values >= 0].sort().values.double()
    middles = ((ordered[1:] + ordered[:-1]) / 2).float()
    assert not (codec(name).encode(middles)[0] & 1).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_encoder_stores_the_same_bytes_as_torch(name):
    values = awkward_values(1)
    codes, scales = codec(name).encode(values)
    written, written_scales, _, _ = write_values(name, values)
    assert torch.equal(written, codes)
    assert scales is None or torch.equal(written_scales, scales.view(torch.int16))


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_bf16_activations_are_widened_before_they_are_encoded(name):
    values = awkward_values(2).clamp(-3e38, 3e38).bfloat16()
    codes, _ = codec(name).encode(values)
    assert torch.equal(write_values(name, values)[0], codes)


@pytest.mark.parametrize("name", NAMES)
def test_nonfinite_input_is_stored_as_zero_and_counted_per_row(name):
    values = torch.ones(48, 16)
    values[3, 5], values[7, 0], values[7, 15] = torch.nan, torch.inf, -torch.inf
    written, _, attention, batch = write_values(name, values)
    clean = torch.where(torch.isfinite(values), values, torch.zeros(()))
    assert torch.equal(written, codec(name).encode(clean)[0])
    assert torch.equal(written, codec(name).encode(values)[0])
    assert attention.kv_nonfinite_total == 3
    assert np.flatnonzero(batch.nonfinite_rows).tolist() == [3, 7]


@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3", "fp8_e5m2", "int8", "bf16"])
def test_values_beyond_the_largest_saturate_and_are_counted(name):
    limit = codec(name).max_finite
    values = torch.full((1, 16), 1.0)
    values[0, 1], values[0, 2] = torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max
    values[0, 3] = limit
    written, scales, attention, _ = write_values(name, values)
    decoded = codec(name).decode(written, scales.view(torch.float16) if name == "int8" else None)
    assert decoded[0, 1:4].tolist() == [limit, -limit, limit]
    assert attention.kv_saturated_total == 2


def test_a_row_of_zeros_gets_int8_scale_zero_and_no_nan():
    codes, scales = codec("int8").encode(torch.zeros(2, 16))
    assert not codes.any()
    assert not scales.any()
    assert not codec("int8").decode(codes, scales).any()


def test_a_constant_row_survives_int8():
    codes, scales = codec("int8").encode(torch.full((1, 16), 3.0))
    assert torch.allclose(codec("int8").decode(codes, scales), torch.full((1, 16), 3.0), rtol=1e-3)


def test_int8_rounds_and_does_not_truncate():
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(3))
    codes, scales = codec("int8").encode(x)
    error = codec("int8").decode(codes, scales) - x
    assert (error.abs() <= 0.5001 * scales.float()[:, None] + 0.06 * scales.float()[:, None]).all()
    assert abs(float((error * x.sign()).mean())) < 0.02 * float(scales.float().mean())


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_the_sign_of_zero_is_kept(name):
    codes, _ = codec(name).encode(torch.tensor([[-0.0, 0.0]]))
    assert torch.signbit(codec(name).decode(codes, None)).tolist() == [[True, False]]
