"""What some families have beside the rest, in the CUDA kernels: executed through the host shim, against plain torch."""

from dataclasses import replace

import pytest
import torch
from cuda_harness import Stored, check_close, close
from kernel_harness import random, rope_tables

from deepinfer.kernels.cuda.decode_plan import DecodePlan
from deepinfer.kernels.cuda.elementwise import (
    CudaElementwise,
    norm_source,
    projection_norm_source,
    silu_source,
    soft_cap_source,
)
from deepinfer.kernels.cuda.nvrtc import compile_kernel
from deepinfer.kernels.elementwise import reference_gelu_mul, reference_rms_norm, reference_soft_cap
from deepinfer.kernels.kv_formats import resolve_kv_format

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5
GEMMA_SHAPES = ((256, 2), (256, 4), (128, 2))
"""head_dim, and query heads for each KV head, of published Gemma 2 and 3 models."""


@pytest.fixture(scope="module")
def rows_of(backend):
    return CudaElementwise(backend)


@pytest.mark.parametrize(("dtype", "normed"), [(torch.float32, False), (torch.bfloat16, True)])
def test_what_is_added_is_normalised_first(rows_of, dtype, normed):
    x, delta = 3 * random(3, 1028), (5 * random(3, 1028, seed=1)).to(dtype)
    delta_weight, weight = random(1028, seed=2), random(1028, seed=3) if normed else None
    residual, out = x.clone(), torch.empty(3, 1028, dtype=dtype)
    rows_of.add_normed(residual, delta, delta_weight, weight, EPS, out)
    assert torch.allclose(residual, x + reference_rms_norm(delta.float(), delta_weight, EPS), atol=4e-6, rtol=4e-6)
    assert close(out, reference_rms_norm(residual, weight, EPS) if normed else residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_a_norm_of_a_whole_projection_leaves_the_values_alone(rows_of, dtype):
    qkv, q_weight, k_weight = (3 * random(3, 1300)).to(dtype), random(1032, seed=1), random(132, seed=2)
    got = qkv.clone()
    rows_of.projection_norm(got, q_weight, k_weight, EPS)
    q, k, v = qkv.float().split((1032, 132, 136), dim=1)
    expected = torch.cat((reference_rms_norm(q, q_weight, EPS), reference_rms_norm(k, k_weight, EPS), v), dim=1)
    assert close(got, expected)
    assert torch.equal(got[:, 1164:], qkv[:, 1164:])


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_the_gate_with_gelu_agrees_with_torch(rows_of, dtype):
    gate_up = (4 * random(3, 2 * 1028)).to(dtype)
    gate_up[0, :5] = torch.tensor([0.0, -200.0, 200.0, -6.0, 1e-3])
    out = torch.empty(3, 1028, dtype=dtype)
    rows_of.gelu_mul(gate_up, out)
    assert close(out, reference_gelu_mul(gate_up))


def test_soft_caps_agree_with_torch_and_keep_nan(rows_of):
    values = 40 * random(3, 1001)
    values[0, :6] = torch.tensor([0.0, 1e-4, -1e-4, 1e9, float("-inf"), float("nan")])
    expected = reference_soft_cap(values, 30.0)
    rows_of.soft_cap(values, 30.0)
    assert torch.allclose(values, expected, atol=1e-5, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("fmt", "window"), [("fp16", 0), ("int8", 50)])
def test_capped_scores_agree_with_the_reference(backend, fmt, window):
    case = Stored(fmt, (1, 33, 150), heads=(2, 1), window=window)
    case.spec = replace(case.spec, scale=1.0, soft_cap=2.0)
    expected, got, *_ = case.both(backend)
    check_close(expected, got, limit=2e-5)


@pytest.mark.parametrize("choice", [0, None])
def test_a_layer_rotates_by_its_own_tables_or_not_at_all(backend, choice):
    case = Stored("fp16", (1, 33, 70), heads=(2, 1))
    tables = rope_tables(70, 64), rope_tables(70, 64, 50.0)
    case.cos, case.sin = (torch.stack(each) for each in zip(*tables, strict=True))
    case.spec = replace(case.spec, rope_tables=(1, choice))
    for layer in (0, 1):
        expected, got, expected_pool, got_pool = case.both(backend, layer)
        assert torch.equal(expected_pool, got_pool)
        check_close(expected, got, limit=1e-5)


def sources():
    for dtype in DTYPES:
        yield from (norm_source(True, dtype, 5376, True, normed) for normed in (True, False))
        yield from (projection_norm_source(dtype), silu_source(dtype, gelu=True))
    yield soft_cap_source()


def test_the_kernels_compile_for_sm_86_without_spills():
    for source in sources():
        used = compile_kernel(source).resources
        assert (used.spill_stores, used.spill_loads, used.stack_bytes) == (0, 0, 0), f"{source}: {used}"


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["fp16", "int8", "e4m3"])
def test_attention_with_soft_caps_and_writes_without_rope_compile_for_sm_86_without_spills(fmt):
    pair = resolve_kv_format(fmt)
    for head_dim, group in GEMMA_SHAPES:
        plan = DecodePlan(pair.k, pair.v, head_dim, group, 16, soft_cap=True)
        for source in (plan.decode_source(), plan.write_source(1, False, rotate=False)):
            used = compile_kernel(source).resources
            assert (used.spill_stores, used.spill_loads, used.stack_bytes) == (0, 0, 0), f"{source}: {used}"
