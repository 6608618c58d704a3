"""Matmuls over packed weights: exact but for the rounding of y, and rows that do not depend on the batch."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from file_blocks import by_the_package, random_rows
from matmul_cases import assert_rows_do_not_depend_on_the_batch, quantised_int4, quantised_int8, random

from deepinfer.kernels import packed_linear
from deepinfer.kernels.cpu import amx, bf16_dot, jit, packed_matmul, packed_products, vector_matmul
from deepinfer.kernels.cpu.records import P_BF16, P_INT4, P_INT8
from deepinfer.kernels.devices import DeviceError, open_device
from deepinfer.kernels.linear import DenseLinear, dequantise
from deepinfer.kernels.ops import CpuOps
from deepinfer.kernels.packed_linear import PackedLinear
from deepinfer.kernels.stored_rows import stored_rows

needs_bf16_dot = pytest.mark.skipif(not bf16_dot.available(), reason="this processor has no AVX512-BF16")
needs_amx = pytest.mark.skipif(not packed_linear.rounds_tiles(), reason="this processor has no AMX for bf16")
DOTS, TILES, PLAIN = "bf16 dot products", "matrix tiles", "integers of 16 bits and fp32"
ROWS = [1, 2, 3, 4, 5, 8, 9, 21, 64, 70]


@pytest.fixture(params=[pytest.param(DOTS, marks=needs_bf16_dot), pytest.param(TILES, marks=needs_amx), PLAIN])
def products(request, monkeypatch):
    """By what a `PackedLinear` multiplies: what processors with AVX-512 or AMX have, and what they do without."""
    monkeypatch.setattr(amx, "available", lambda: request.param == TILES)
    if request.param == PLAIN:
        monkeypatch.setattr(bf16_dot, "available", lambda: False)
    return request.param


def assert_is_the_exact_product(y, x, weight, bias):
    """`weight` and `bias` float64. Sums run over at most 2,560 fp32 products; bf16 rounds once more."""
    exact = F.linear(x.double(), weight, bias)
    rounding = 2.0**-8 if y.dtype == torch.bfloat16 else 1e-5
    assert y.is_contiguous()
    assert torch.allclose(y.double(), exact, atol=2e-6 * float(exact.abs().max()), rtol=rounding)


def as_words(x):
    """Each 32 of a row to whole multiples of 2^-14 of the power of two at or below their largest magnitude."""
    pieces = x.double().unflatten(1, (-1, 32))
    largest = pieces.abs().amax(-1, keepdim=True)
    step = torch.where(largest > 0, 2.0 ** (largest.log2().floor() - 14), 1.0)
    return (torch.round(pieces / step) * step).flatten(1)


def as_multiplied(x, products):
    """What codes meet; bf16 weights always meet x as it is."""
    return as_words(x) if products == PLAIN else x


def int4_weight(codes, scales, minima, group):
    grouped = codes.double().unflatten(1, (-1, group)) * scales.double().unsqueeze(-1) + minima.double().unsqueeze(-1)
    return grouped.flatten(1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("shape", "group"),
    [((576, 576), 32), ((64, 32), 32), ((20, 64), 64), ((128, 256), 128), ((48, 512), 256), ((32, 2560), 128)],
)
def test_int4_weights_are_scale_times_code_plus_minimum(shape, group, rows, products):
    codes, scales, minima = quantised_int4(*shape, group)
    x, bias = random(rows, shape[1], seed=1, dtype=torch.bfloat16), random(shape[0])
    for dtype in (torch.bfloat16, torch.float32):
        y = PackedLinear(P_INT4, codes, scales, minima, bias, group, dtype)(x)
        assert y.dtype == dtype
        assert_is_the_exact_product(
            y, as_multiplied(x, products), int4_weight(codes, scales, minima, group), bias.double()
        )


def test_every_code_of_every_place_in_a_group_counts(products):
    """Multiplying the identity gives the weights back, exactly: nothing about them is rounded."""
    codes, scales, minima = quantised_int4(32, 128, 64)
    scales, minima = scales.half().float(), minima.half().float()
    linear = PackedLinear(P_INT4, codes, scales, minima, None, 64, torch.float32)
    weight = linear(torch.eye(128).bfloat16()).t()
    assert torch.equal(
        weight, torch.addcmul(minima.repeat_interleave(64, 1), codes.float(), scales.repeat_interleave(64, 1))
    )
    codes, scales = quantised_int8(48, 64)
    linear = PackedLinear(P_INT8, codes, scales, out_dtype=torch.float32)
    weight = linear(torch.eye(64).bfloat16()).t()
    assert torch.equal(weight, codes.float() * scales.repeat_interleave(32, 1))


def test_scales_take_half_the_memory_where_fp16_holds_them_exactly():
    codes, scales, minima = quantised_int4(64, 64, 32)
    exact = PackedLinear(P_INT4, codes, scales, minima)
    rounded = PackedLinear(P_INT4, codes, scales.half(), minima.half())
    assert exact.weight_bytes - rounded.weight_bytes == 2 * 2 * scales.numel()
    assert rounded.weight_bytes == 64 * 64 * 5 // 8 + 4 * 64
    too_large = PackedLinear(P_INT4, codes, 1e5 * scales, minima, out_dtype=torch.float32)
    x = as_words(random(3, 64, seed=1, dtype=torch.bfloat16)).bfloat16()
    assert_is_the_exact_product(too_large(x), x, int4_weight(codes, 1e5 * scales, minima, 32), None)


def test_activations_of_16_bits_are_exact_within_seven_powers_of_two(monkeypatch):
    """And rounded to a multiple of the step below: beside 1 that is 2^-14."""
    monkeypatch.setattr(bf16_dot, "available", lambda: False)
    linear = PackedLinear(P_INT8, torch.eye(32, dtype=torch.int8), torch.ones(32, 1), out_dtype=torch.float32)
    x = torch.zeros(4, 32)
    x[:, 0] = 1.0
    x[:, 1] = torch.tensor([255 / 2**14, -129 / 2**14, 2.0**-14 * 1.25, 2.0**-16])
    exact, expected = linear(x.bfloat16()), x.clone()
    expected[2, 1], expected[3, 1] = 2.0**-14, 0.0
    assert torch.equal(x.bfloat16().float(), x)
    assert torch.equal(exact, expected)


@pytest.mark.parametrize("size", [1.1754944e-38, 1e-41, 3.3e38])
def test_the_smallest_and_the_largest_activations_of_16_bits_stay_finite(monkeypatch, size):
    monkeypatch.setattr(bf16_dot, "available", lambda: False)
    linear = PackedLinear(P_INT8, torch.eye(32, dtype=torch.int8), torch.ones(32, 1), out_dtype=torch.float32)
    x = torch.full((1, 32), size).bfloat16()
    assert torch.allclose(linear(x), x.float(), rtol=0, atol=2.0**-126)


def test_products_of_processors_without_such_instructions_are_the_same(monkeypatch, tmp_path):
    """Integers are multiplied exactly in any way. The code is kept apart from what this processor uses."""
    x = random(9, 192, seed=1, dtype=torch.bfloat16)
    codes, scales, minima = quantised_int4(48, 192, 64)

    def products():
        for rows in (x, x[:2]):
            yield PackedLinear(P_INT4, codes, scales, minima, None, 64)(rows)
            yield PackedLinear(P_INT4, codes, scales, minima, None, 64, int8_activations=True)(rows)
            yield PackedLinear(P_INT8, *quantised_int8(48, 192), out_dtype=torch.float32)(rows)

    monkeypatch.setattr(bf16_dot, "available", lambda: False)
    expected = list(products())
    monkeypatch.setattr(packed_products, "avx2_available", lambda: False)
    monkeypatch.setattr(packed_products, "vnni_available", lambda: False)
    monkeypatch.setattr(packed_matmul, "vnni_available", lambda: False)
    monkeypatch.setattr(jit, "CACHE_FOLDER", tmp_path)
    monkeypatch.setattr(packed_matmul, "packed_units", packed_matmul.packed_units.__wrapped__)
    monkeypatch.setattr(packed_linear, "packed_units", packed_matmul.packed_units)
    monkeypatch.setattr(vector_matmul, "matmul_unit", vector_matmul.matmul_unit.__wrapped__)
    assert all(torch.equal(y, other) for y, other in zip(products(), expected, strict=True))


def rounded_to_bytes(x):
    """Each 32 of a row to whole multiples of their largest magnitude / 127, in fp32 as the kernel divides."""
    pieces = x.float().unflatten(1, (-1, 32))
    scale = pieces.abs().amax(-1, keepdim=True) * torch.tensor(1 / 127)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (torch.round(pieces * inverse).clamp(-127, 127).double() * scale.double()).flatten(1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("shape", "group"), [((576, 576), 32), ((64, 32), 32), ((20, 64), 64), ((128, 256), 128), ((48, 512), 256)]
)
def test_activations_of_8_bits_are_multiplied_without_further_rounding(shape, group, rows):
    codes, scales, minima = quantised_int4(*shape, group)
    x, bias = random(rows, shape[1], seed=1, dtype=torch.bfloat16), random(shape[0])
    weight = int4_weight(codes, scales, minima, group)
    for dtype in (torch.bfloat16, torch.float32):
        y = PackedLinear(P_INT4, codes, scales, minima, bias, group, dtype, int8_activations=True)(x)
        assert y.dtype == dtype
        assert_is_the_exact_product(y, rounded_to_bytes(x), weight, bias.double())


def test_activations_that_8_bits_hold_lose_nothing():
    """Rows of whole numbers whose largest is 127, beside rows of zeros."""
    codes, scales, minima = quantised_int4(64, 128, 32)
    x = torch.randint(-127, 128, (9, 128), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32], x[4] = 127.0, 0.0
    assert torch.equal(x.bfloat16().float(), x)
    exact, rounded = (PackedLinear(P_INT4, codes, scales, minima, int8_activations=int8) for int8 in (False, True))
    assert torch.equal(rounded(x.bfloat16()), exact(x.bfloat16()))
    other = random(9, 128, seed=2, dtype=torch.bfloat16)
    assert not torch.equal(rounded(other), exact(other))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(576, 576), (20, 32), (1000, 64)])
def test_int8_weights_are_code_times_scale(shape, rows, products):
    codes, scales = quantised_int8(*shape)
    x, bias = random(rows, shape[1], seed=2, dtype=torch.bfloat16), random(shape[0], seed=3)
    weight = (codes.double().unflatten(1, (-1, 32)) * scales.double().unsqueeze(-1)).flatten(1)
    for dtype in (torch.bfloat16, torch.float32):
        y = PackedLinear(P_INT8, codes, scales, bias=bias, out_dtype=dtype)(x)
        assert_is_the_exact_product(y, as_multiplied(x, products), weight, bias.double())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(576, 576), (576, 1536), (32, 48), (20, 40)])
def test_bf16_weights_are_multiplied_as_they_are(shape, rows, products):
    weight, bias = random(*shape, dtype=torch.bfloat16), random(shape[0], seed=2, dtype=torch.bfloat16)
    x = random(rows, shape[1], seed=1, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        y = PackedLinear(P_BF16, weight, bias=bias, out_dtype=dtype)(x)
        assert_is_the_exact_product(y, x, weight.double(), bias.double())


@pytest.mark.parametrize(("kind", "type_name"), [(P_BF16, "Q6_K"), (P_INT8, "Q8_0"), (P_INT4, "Q4_K")])
def test_rows_of_files_are_multiplied_as_their_dense_weights_are(kind, type_name, products):
    raw, bias, x = random_rows(type_name, 40, 256), random(40), random(3, 256, seed=1, dtype=torch.bfloat16)
    linear = PackedLinear(kind, stored_rows("w", type_name, raw, 256), bias=bias, out_dtype=torch.float32)
    weights = torch.from_numpy(by_the_package(type_name, raw))
    weights = weights.bfloat16() if kind == P_BF16 else weights
    active = x if kind == P_BF16 else as_multiplied(x, products)
    assert_is_the_exact_product(linear(x), active, weights.double(), bias.double())
    ids = torch.tensor([39, 0, 16], dtype=torch.int32)
    assert torch.equal(linear.rows(ids), weights.float()[ids.long()])


def test_rows_of_files_without_such_codes_are_refused():
    rows = stored_rows("w", "Q6_K", random_rows("Q6_K", 16, 256), 256)
    for kind in (P_INT4, P_INT8):
        with pytest.raises(ValueError, match=f"Q6_K has no codes for kind {kind}"):
            PackedLinear(kind, rows)


def every_kind(outputs, width):
    codes, scales, minima = quantised_int4(outputs, width, 32)
    yield PackedLinear(P_INT4, codes, scales, minima)
    yield PackedLinear(P_INT4, codes, scales.half(), minima.half(), group=32, out_dtype=torch.float32)
    yield PackedLinear(P_INT8, *quantised_int8(outputs, width), out_dtype=torch.float32)
    yield PackedLinear(P_BF16, random(outputs, width, dtype=torch.bfloat16))
    yield PackedLinear(P_INT4, codes, scales, minima, int8_activations=True)


def test_rows_of_the_weights_come_back_exactly():
    ids = torch.tensor([37, 0, 15, 16, 37, 39], dtype=torch.int32)
    for wide in (False, True):
        codes, scales, minima = quantised_int4(40, 128, 64)
        if not wide:
            scales, minima = scales.half().float(), minima.half().float()
        rows = PackedLinear(P_INT4, codes, scales, minima, None, 64).rows(ids)
        assert torch.equal(rows, dequantise(codes, scales, minima, 64)[ids.long()])
        codes, scales = quantised_int8(40, 64)
        scales = scales if wide else scales.half().float()
        assert torch.equal(
            PackedLinear(P_INT8, codes, scales).rows(ids), (codes.float() * scales.repeat_interleave(32, 1))[ids.long()]
        )
    weight = random(40, 48, dtype=torch.bfloat16)
    assert torch.equal(PackedLinear(P_BF16, weight).rows(ids), weight.float()[ids.long()])
    assert PackedLinear(P_BF16, weight).rows(ids[:0]).shape == (0, 48)


@pytest.mark.parametrize("shape", [(576, 576), (100, 1536)])
def test_rows_are_bit_equal_in_any_batch_and_chunk(shape, products):
    x = random(150, shape[1], seed=1, dtype=torch.bfloat16)
    for linear in every_kind(*shape):
        assert_rows_do_not_depend_on_the_batch(linear, x[:70])
        whole = linear(x)
        for chunk in (1, 7, 64, 128, 149):
            assert torch.equal(torch.cat([linear(part) for part in x.split(chunk)]), whole)


def test_a_row_that_is_not_finite_stays_alone(products):
    x = random(13, 96, seed=1, dtype=torch.bfloat16)
    for linear in every_kind(48, 96):
        clean = linear(x)
        for value in (float("nan"), float("inf")):
            broken = x.clone()
            broken[5, 17] = value
            y = linear(broken)
            assert not y[5].isfinite().any()
            others = [row for row in range(13) if row != 5]
            assert torch.equal(y[others], clean[others])


def test_only_a_copy_costs_memory_and_only_many_rows_use_it(monkeypatch):
    monkeypatch.setattr(amx, "available", lambda: False)
    codes, scales, minima = quantised_int4(576, 576, 32)
    packed = CpuOps().w4a16(codes, scales, minima, None, 32, batch_invariant=False, bf16_prefill=False)
    copied = CpuOps().w4a16(codes, scales, minima, None, 32, batch_invariant=False, bf16_prefill=True)
    invariant = CpuOps().w4a16(codes, scales, minima, None, 32, batch_invariant=True, bf16_prefill=True)
    assert copied.weight_bytes == packed.weight_bytes + 2 * 576 * 576
    assert invariant.weight_bytes == packed.weight_bytes
    assert copied.kind == packed.kind + " + bf16 copy"
    x = random(17, 576, seed=1, dtype=torch.bfloat16)
    assert torch.equal(copied(x[:16]), packed(x[:16]))
    dense = F.linear(x, dequantise(codes, scales, minima, 32).bfloat16())
    assert torch.equal(copied(x), dense)
    assert not torch.equal(packed(x), dense)


@needs_amx
@pytest.mark.parametrize(("shape", "group"), [((576, 576), 32), ((48, 512), 128), ((32, 2560), 256)])
def test_by_tiles_many_rows_meet_rounded_weights_that_take_no_memory(shape, group):
    codes, scales, minima = quantised_int4(*shape, group)
    for wide in (True, False):
        if not wide:
            scales, minima = scales.half().float(), minima.half().float()
        exact, rounded, invariant = (
            CpuOps().w4a16(codes, scales, minima, None, group, batch_invariant, bf16_prefill, torch.float32)
            for batch_invariant, bf16_prefill in ((False, False), (False, True), (True, True))
        )
        assert (rounded.kind, invariant.kind) == ("w4a16 bf16 AMX + rounded to bf16", "w4a16 bf16 AMX")
        assert rounded.weight_bytes == exact.weight_bytes
        x = random(270, shape[1], seed=1, dtype=torch.bfloat16)
        assert torch.equal(rounded(x[:64]), exact(x[:64]))
        assert torch.equal(invariant(x), exact(x))
        weight = dequantise(codes, scales, minima, group).bfloat16()
        for rows in (65, 80, 256, 270):
            assert_is_the_exact_product(rounded(x[:rows]), x[:rows], weight.double(), None)
            assert not torch.equal(rounded(x[:rows]), exact(x[:rows]))


@needs_amx
def test_matrix_tiles_differ_from_dot_products_in_the_order_of_sums_only(monkeypatch):
    codes, scales, minima = quantised_int4(576, 576, 32)
    x = random(16, 576, seed=1, dtype=torch.bfloat16)
    by_tiles = PackedLinear(P_INT4, codes, scales, minima, out_dtype=torch.float32)
    monkeypatch.setattr(amx, "available", lambda: False)
    by_dots = PackedLinear(P_INT4, codes, scales, minima, out_dtype=torch.float32)
    assert (by_tiles.kind, by_dots.kind) == ("w4a16 bf16 AMX", "w4a16 bf16 dot")
    assert not torch.equal(by_tiles(x), by_dots(x))
    assert torch.allclose(by_tiles(x), by_dots(x), rtol=1e-5, atol=1e-6 * float(by_dots(x).abs().max()))


@pytest.mark.parametrize(("answer", "granted"), [(0, True), (-1, False)])
def test_tiles_that_the_system_does_not_grant_are_not_used_and_the_log_says_so(monkeypatch, caplog, answer, granted):
    kernel = SimpleNamespace(syscall=lambda *_: answer)
    monkeypatch.setattr(amx.binding, "get_host_cpu_features", lambda: {"amx-tile": True, "amx-bf16": True})
    monkeypatch.setattr(amx.platform, "system", lambda: "Linux")
    monkeypatch.setattr(amx.ctypes, "CDLL", lambda *_, **__: kernel)
    assert amx.available.__wrapped__() == granted
    assert ("the system does not let this process use it" in caplog.text) != granted


@needs_bf16_dot
def test_without_matrix_tiles_dot_products_take_every_row(monkeypatch):
    monkeypatch.setattr(amx, "available", lambda: False)
    linear = CpuOps().w4a16(*quantised_int4(32, 64, 32), None, 32, batch_invariant=False, bf16_prefill=False)
    assert linear.kind == "w4a16 bf16 dot"


def test_packed_weights_serve_all_but_fp32():
    ops = CpuOps()
    assert isinstance(ops.dense(random(32, 64, dtype=torch.bfloat16), None, True), PackedLinear)
    assert isinstance(ops.w8a16(*quantised_int8(32, 64)), PackedLinear)
    assert isinstance(ops.dense(random(32, 64), None, True), DenseLinear)


def test_activations_are_rounded_only_where_that_is_asked_for_and_possible():
    def kind(ops):
        return ops.w4a16(*quantised_int4(32, 64, 32), None, 32, batch_invariant=False, bf16_prefill=False).kind

    with pytest.raises(DeviceError, match="w4_activations is 'int8', which host-emulation does not have"):
        open_device("host-emulation", "int8")
    assert kind(open_device("cpu", "int8")) == "w4a8 int8 dot"
    assert kind(open_device("cpu")).startswith("w4a16 ")


@pytest.mark.parametrize(
    ("kind", "codes", "factors", "message"),
    [
        (P_INT4, torch.zeros(32, 48, dtype=torch.uint8), [torch.zeros(32, 1)] * 2, "divide 48"),
        (P_INT4, torch.zeros(32, 64, dtype=torch.int8), [torch.zeros(32, 2)] * 2, "must be torch.uint8"),
        (P_INT4, torch.zeros(32, 64, dtype=torch.uint8), [torch.zeros(32, 2)], r"must be 2 of \(32, 2\)"),
        (P_INT8, torch.zeros(32, 64, dtype=torch.int8), [torch.zeros(32, 1)], r"not \[\(32, 1\)\]"),
        (P_BF16, torch.zeros(32, 64), [], "must be torch.bfloat16"),
        (P_BF16, torch.zeros(0, 64, dtype=torch.bfloat16), [], "weights without rows"),
    ],
)
def test_weights_that_do_not_fit_are_refused(kind, codes, factors, message):
    with pytest.raises(ValueError, match=message):
        PackedLinear(kind, codes, *factors)


def test_activations_that_do_not_fit_are_refused():
    linear = PackedLinear(P_BF16, random(32, 64, dtype=torch.bfloat16), bias=torch.zeros(32))
    with pytest.raises(ValueError, match="x must be bf16 with 64 columns"):
        linear(random(1, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="with 64 columns, not torch"):
        linear(random(1, 64))
    with pytest.raises(ValueError, match="bias"):
        PackedLinear(P_BF16, random(32, 64, dtype=torch.bfloat16), bias=torch.zeros(31))
