"""What the inner loops cost on sm_86, counted in the machine code."""

import pytest

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.cuda.decode_plan import DecodePlan
from deepinfer.kernels.cuda.nvrtc import compile_kernel
from deepinfer.kernels.cuda.report import inner_loops, instructions_per_element, prefill_row


def loops(fmt, head_dim, group):
    pair = resolve_kv_format(fmt)
    return inner_loops(compile_kernel(DecodePlan(pair.k, pair.v, head_dim, group, 16).decode_source()), group)


def cost(fmt, head_dim, group):
    """Instructions for one element of K and one of V."""
    return sum(instructions_per_element(loop, group) for loop in loops(fmt, head_dim, group))


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8])
def test_one_byte_formats_cost_at_most_half_more_instructions_than_fp16(group):
    baseline = cost("fp16", 128, group)
    for fmt in ("int8", "e4m3", "e5m2", "e4m3/e5m2"):
        assert cost(fmt, 128, group) <= 1.5 * baseline, f"{fmt}: {cost(fmt, 128, group)} against {baseline}"


@pytest.mark.parametrize("fmt", ["fp16", "int8", "e4m3", "e5m2"])
def test_inner_loops_have_no_branch_but_their_own_and_touch_no_global_or_local_memory(fmt):
    for loop in loops(fmt, 128, 4):
        opcodes = loop.opcodes
        assert opcodes["BRA"] == 1
        assert not {"LDG", "STG", "LDL", "STL", "BSSY", "CALL", "I2F", "F2F"} & set(opcodes)


def test_fp8_is_decoded_two_values_at_a_time():
    for loop in loops("e5m2", 128, 4):
        elements = loop.opcodes["FFMA"] / 4
        assert loop.opcodes["PRMT"] == elements / 2
        assert loop.opcodes["HADD2"] == elements


@pytest.mark.parametrize(("head_dim", "fmt"), [(64, "fp16"), (128, "int8"), (128, "e4m3")])
def test_a_prefill_tile_takes_the_tensor_core_more_time_than_everything_else_takes_to_issue(head_dim, fmt):
    """On sm_86 a product of 16 x 8 x 16 with fp32 sums keeps the tensor core of a quarter of a multiprocessor busy for
    32 clocks, in which that quarter issues 32 instructions."""
    row = prefill_row(fmt, head_dim)
    assert row.tensor_core == row.tile_tokens // 8 * (head_dim // 16) * 3
    assert row.instructions < 32 * row.tensor_core
