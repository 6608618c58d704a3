"""The 4-bit matmul on the CUDA path against float64, and the promises about its rows."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_harness import check_close
from hypothesis import given, settings
from hypothesis import strategies as st
from w4_harness import Case

from deepinfer.kernels.cpu.records import P_INT4
from deepinfer.kernels.cuda.gemv_plan import MAX_ROWS, plan_gemv
from deepinfer.kernels.packed_linear import PackedLinear

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {FP32: 0.0, FP16: 2.0**-11, BF16: 2.0**-8}
"""Half a unit in the last place of the result, relative."""
SUM_ERROR = 2.0**-20
"""Of fp32 sums, relative to the sum of absolute products."""


def check_product(case, x, y):
    expected = case.product(x)
    limit = SUM_ERROR * case.scale_of_sums(x) + ROUNDING[y.dtype] * expected.abs()
    assert ((y.double() - expected).abs() <= limit).all()


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("minima", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", [3, 11])
def test_the_product_is_that_of_the_stored_weights(backend, group_size, minima, dtype, rows):
    case = Case(83, 384, group_size, minima, dtype=dtype, seed=rows)
    linear, x = case.linear(backend, out_dtype=FP32), case.x(rows)
    assert linear.tiles.minima == minima
    check_product(case, x, linear(x))


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_product_is_that_of_the_cpus_4_bit_matmul(backend, group_size):
    case = Case(64, 384, group_size, dtype=BF16)
    case.scales, case.minima = case.scales.bfloat16().float(), (case.scales * -7).bfloat16().float()
    case.bias = case.bias.bfloat16()
    weights = case.codes, case.scales, case.minima, case.bias
    cpu, x = PackedLinear(P_INT4, *weights, group_size), case.x(5)
    difference = (cpu(x).float() - case.linear(backend)(x).float()).abs()
    assert (difference <= 3 * ROUNDING[BF16] * (case.product(x).abs() + 1)).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    outputs=st.integers(1, 70),
    groups=st.integers(1, 9),
    group_size=st.sampled_from([32, 64, 128]),
    rows=st.integers(1, MAX_ROWS),
    seed=st.integers(0, 1000),
)
def test_any_shape_gives_the_right_product(backend, outputs, groups, group_size, rows, seed):
    case = Case(outputs, groups * group_size, group_size, seed=seed)
    x = case.x(rows)
    y = case.linear(backend)(x)
    assert y.dtype == FP16
    check_product(case, x, y)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("outputs", "inputs"), [(2080, 64), (40, 1152), (2048, 1024)])
def test_wide_and_long_weights_take_other_plans_and_give_the_right_product(backend, outputs, inputs, dtype):
    case = Case(outputs, inputs, 64, bias=False, dtype=dtype)
    linear, x = case.linear(backend, out_dtype=dtype), case.x(2)
    plan = plan_gemv(linear.tiles, 2)
    assert (plan.m_tiles, plan.warps) == (2 if outputs >= 2048 else 1, 8 if inputs >= 1024 else 4)
    check_product(case, x, linear(x))


def test_the_limits_of_validation_hold_for_results_of_ordinary_size(backend):
    case = Case(64, 576, 32, bias=False)
    x = case.x(16) * 0.1
    check_close(case.product(x), case.linear(backend)(x))


@pytest.mark.parametrize(
    ("outputs", "group_size", "dtype"), [(48, 32, BF16), (48, 128, FP16), (2048, 32, FP16), (2048, 128, BF16)]
)
def test_a_row_is_bit_equal_alone_and_in_every_batch(backend, outputs, group_size, dtype):
    case = Case(outputs, 1152 if outputs == 48 else 256, group_size, dtype=dtype)
    linear, x = case.linear(backend, batch_invariant=True, out_dtype=FP32), case.x(35)
    together = linear(x)
    singles = torch.cat([linear(x[row : row + 1]) for row in range(0, 35, 5)])
    assert torch.equal(together[::5], singles)
    for first, last in ((0, 8), (3, 12), (19, 35)):
        assert torch.equal(together[first:last], linear(x[first:last]))
    order = torch.randperm(16, generator=case.generator)
    assert torch.equal(together[:16][order], linear(x[:16][order]))


@pytest.mark.parametrize("rows", [1, 7, 9, 15])
def test_nothing_outside_the_rows_is_read_or_written(backend, rows):
    case = Case(37, 96, 32)
    linear = case.linear(backend)
    x = torch.full((MAX_ROWS + 2, 96), torch.nan, dtype=FP16)
    y = torch.full((MAX_ROWS + 2, 37), 7.0, dtype=FP16)
    x[1 : 1 + rows] = case.x(rows)
    linear.multiply(x[1 : 1 + rows], y[1 : 1 + rows])
    check_product(case, x[1 : 1 + rows], y[1 : 1 + rows])
    assert (y[0] == 7.0).all()
    assert (y[1 + rows :] == 7.0).all()


@pytest.mark.parametrize(("arguments", "signal_number"), [((), 0), (("overreach",), -signal.SIGSEGV)])
def test_no_byte_after_a_tensor_is_touched(arguments, signal_number):
    program = Path(__file__).parent / "guarded.py"
    assert subprocess.run([sys.executable, program, *arguments], timeout=120).returncode == signal_number


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("minima", [True, False])
def test_a_value_that_is_not_finite_stays_in_its_row(backend, value, minima):
    case = Case(48, 128, 32, minima)
    linear, x = case.linear(backend), case.x(12)
    clean = linear(x)
    x[5, 77] = value
    y = linear(x)
    assert not torch.isfinite(y[5]).any()
    others = torch.arange(12) != 5
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("unit", [2.0**-30, 2.0**12])
def test_scales_far_from_one_keep_their_accuracy(backend, unit):
    case = Case(32, 128, 64, bias=False, dtype=BF16, unit=unit)
    x = case.x(4)
    y = case.linear(backend, out_dtype=FP32)(x)
    assert ((y.double() - case.product(x)).abs() <= SUM_ERROR * unit * 200).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("minima", [True, False])
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(83, 96, 32), (16, 192, 64), (50, 256, 128)])
def test_dequantised_weights_are_the_rounded_ones_bit_for_bit(backend, outputs, inputs, group_size, minima, dtype):
    case = Case(outputs, inputs, group_size, minima, dtype=dtype)
    linear = case.linear(backend)
    first = 1 if outputs > 16 else 0
    target = torch.full((linear.tiles.output_tiles * 16, inputs), 7.0, dtype=dtype)
    linear.dequantise(target, first)
    rows = outputs - 16 * first
    assert torch.equal(target[:rows], case.weights[16 * first :].to(dtype))
    assert (target[rows:] == 7.0).all()


@pytest.mark.parametrize("pieces", [1, 3])
def test_many_rows_go_through_dequantised_weights(backend, pieces, monkeypatch):
    if pieces > 1:
        monkeypatch.setattr("deepinfer.kernels.cuda.linear.WORKSPACE_BYTES", 2 * 128 * 32)
    case = Case(83, 128, 32)
    linear, x = case.linear(backend), case.x(MAX_ROWS + 1)
    expected, y = case.product(x), linear(x)
    assert ((y.double() - expected).abs() <= 0.01 * expected.abs() + 0.02).all()
    assert not torch.equal(y, case.linear(backend, batch_invariant=True)(x))


def test_memory_is_half_a_byte_a_weight_and_four_or_two_a_group(backend):
    weights, groups = 64 * 256, 64 * 256 // 32
    assert Case(64, 256, 32, bias=False).linear(backend).weight_bytes == weights // 2 + 4 * groups
    assert Case(64, 256, 32, minima=False, bias=False).linear(backend).weight_bytes == weights // 2 + 2 * groups
    assert Case(64, 256, 128).linear(backend).step_bytes == weights // 2 + 4 * groups // 4 + 4 * 64


def test_weights_and_rows_that_do_not_fit_are_refused(backend):
    def refuse(match, **changes):
        case = Case(32, 256, 32)
        for name, value in changes.items():
            setattr(case, name, value)
        with pytest.raises(ValueError, match=match):
            case.linear(backend)

    refuse("group_size must be one of", group_size=256)
    refuse("from 0 to 15", codes=torch.full((32, 256), 16, dtype=torch.uint8))
    refuse("codes must be uint8", codes=torch.zeros(32, 256, dtype=torch.int32))
    refuse("must be \\(32, 8\\)", scales=torch.ones(32, 4))
    refuse("finite", minima=torch.full((32, 8), torch.inf))
    refuse("bias", bias=torch.zeros(31))
    linear = Case(32, 256, 32).linear(backend)
    with pytest.raises(ValueError, match="must be \\[N, 256\\]"):
        linear(torch.zeros(2, 128, dtype=FP16))
    with pytest.raises(ValueError, match="bf16 or fp16"):
        linear(torch.zeros(2, 256))
    with pytest.raises(ValueError, match="contiguous"):
        linear(torch.zeros(256, 2, dtype=FP16).t())
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        linear(torch.zeros(2 * 256 + 1, dtype=FP16)[1:].view(2, 256))
