"""What some families have beside the rest, on the CPU, against plain torch: norms of outputs and projections, gelu,
soft caps, layers without RoPE or with tables of their own.
"""

from dataclasses import replace

import pytest
import torch
from kernel_harness import Case, close, random, rope_tables

from deepinfer.kernels import elementwise
from deepinfer.kernels.attention import AttentionSpec
from deepinfer.kernels.elementwise import reference_rms_norm

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (200, 576), (4, 40)])
@pytest.mark.parametrize("normed", [True, False])
def test_what_is_added_is_normalised_first(dtype, shape, normed):
    x, delta = 3 * random(*shape), (5 * random(*shape, seed=1)).to(dtype)
    delta_weight, weight = random(shape[1], seed=2), random(shape[1], seed=3) if normed else None
    residual, out = x.clone(), torch.empty(shape, dtype=dtype)
    elementwise.add_normed(residual, delta, delta_weight, weight, EPS, out)
    expected = x + reference_rms_norm(delta.float(), delta_weight, EPS)
    assert torch.allclose(residual, expected, atol=2e-6, rtol=2e-6)
    assert close(out, reference_rms_norm(residual, weight, EPS) if normed else residual, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(64, 32, 32), (576, 192, 192), (40, 24, 24)])
def test_a_norm_of_a_whole_projection_leaves_the_values_alone(dtype, widths):
    q_width, k_width, _ = widths
    qkv = (3 * random(5, sum(widths))).to(dtype)
    q_weight, k_weight = random(q_width, seed=1), random(k_width, seed=2)
    got = qkv.clone()
    elementwise.projection_norm(got, q_weight, k_weight, EPS)
    q, k, v = qkv.float().split(widths, dim=1)
    expected = torch.cat((reference_rms_norm(q, q_weight, EPS), reference_rms_norm(k, k_weight, EPS), v), dim=1)
    assert close(got, expected, dtype)
    assert torch.equal(got[:, q_width + k_width :], qkv[:, q_width + k_width :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 40])
def test_rows_are_narrowed_as_torch_does(dtype, width):
    x, out = random(3, width), torch.empty(3, width, dtype=dtype)
    elementwise.narrow(x, out)
    assert torch.equal(out, x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1536), (100, 1536), (4, 40)])
def test_the_gate_with_gelu_agrees_with_torch(dtype, shape):
    gate_up = (4 * random(shape[0], 2 * shape[1])).to(dtype)
    gate_up[0, :5] = torch.tensor([0.0, -200.0, 200.0, -6.0, 1e-3])
    out = torch.empty(shape, dtype=dtype)
    elementwise.gelu_mul(gate_up, out)
    assert close(out, elementwise.reference_gelu_mul(gate_up), dtype)


@pytest.mark.parametrize("width", [49152, 5001, 9])
def test_soft_caps_agree_with_torch_and_keep_nan(width):
    values = 40 * random(3, width)
    values[0, :6] = torch.tensor([0.0, 1e-4, -1e-4, 1e9, float("-inf"), float("nan")])
    expected = elementwise.reference_soft_cap(values, 30.0)
    elementwise.soft_cap(values, 30.0)
    assert torch.isnan(values[0, 5])
    assert torch.allclose(values, expected, atol=4e-6, rtol=1e-6, equal_nan=True)
    assert values.nan_to_num().abs().max() == 30.0


def both(case):
    outs = [
        torch.cat(case.forward(case.attention(backend, case.pool()), case.everything()))
        for backend in ("reference", "numba")
    ]
    return outs


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("fmt", ["fp32", "int8"])
def test_capped_scores_agree_with_the_reference(fmt, window):
    case = Case(fmt, lengths=(5, 40, 65), window=window)
    case.spec = replace(case.spec, scale=3.0, soft_cap=2.0)
    outs = both(case)
    assert torch.allclose(*outs, atol=1e-5, rtol=1e-5)
    case.spec = replace(case.spec, soft_cap=0.0)
    assert not torch.allclose(outs[0], both(case)[0], atol=1e-2)


@pytest.mark.parametrize("layer", [0, 1])
def test_every_layer_rotates_by_its_own_tables_or_not_at_all(layer):
    case = Case("fp32", lengths=(5, 40))
    tables = [rope_tables(40, 16, theta) for theta in (1e4, 50.0)]
    stacked = [torch.stack(each) for each in zip(*tables, strict=True)]
    seen = []
    for choice in (0, 1, None):
        case.cos, case.sin = stacked
        case.spec = replace(case.spec, rope_tables=(1, choice) if layer else (choice, 1))
        outs = [
            torch.cat(case.forward(case.attention(backend, case.pool()), case.everything(), layer))
            for backend in ("reference", "numba")
        ]
        assert torch.allclose(*outs, atol=3e-6, rtol=1e-5)
        case.cos, case.sin = (
            (torch.ones_like(stacked[0][0]), torch.zeros_like(stacked[0][0])) if choice is None else tables[choice]
        )
        case.spec = replace(case.spec, rope_tables=None)
        alone = torch.cat(case.forward(case.attention("numba", case.pool()), case.everything(), layer))
        assert torch.equal(outs[1], alone)
        seen.append(alone)
    assert not torch.allclose(seen[0], seen[1], atol=1e-2)
    assert not torch.allclose(seen[0], seen[2], atol=1e-2)


def test_tables_that_do_not_fit_the_layers_are_refused():
    case = Case("fp32", lengths=(9,))
    with pytest.raises(ValueError, match="1 choices of RoPE tables for 2 layers"):
        replace(case.spec, rope_tables=(0,))
    case.spec = replace(case.spec, rope_tables=(0, 1))
    with pytest.raises(ValueError, match="the layers need 2 RoPE tables"):
        case.attention("numba", case.pool())
    bias = torch.zeros(32)
    with pytest.raises(ValueError, match="layer 1 does not rotate its keys"):
        AttentionSpec(2, 4, 2, 16, 1.0, (0, 0), rope_tables=(0, None), key_bias=(bias, bias))
