"""Split key biases: keys stored as RoPE(Wx), RoPE(b, position) added when they are read."""

from dataclasses import replace

import pytest
import torch
from kernel_harness import Case, assert_bit_equal_in_any_chunking, rope_tables

from deepinfer.kernels.attention import AttentionSpec

RAGGED = (1, 7, 15, 16, 17, 31, 33, 49)
FORMATS = ["fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "int8/fp16"]


def arms(fmt="fp32", size=1.0, layers=(1,), **settings):
    """The same attention twice: with the bias in the projections, and with it in the spec (of `layers`)."""
    inline, split = Case(fmt, **settings), Case(fmt, **settings)
    spec = split.spec
    width = spec.num_kv_heads * spec.head_dim
    bias = size * torch.randn(width, generator=torch.Generator().manual_seed(9))
    split.spec = replace(spec, key_bias=tuple(bias if layer in layers else None for layer in range(2)))
    at = spec.num_q_heads * spec.head_dim
    for rows in inline.qkv:
        rows[:, at : at + width] += bias
    return inline, split


def attend(case, backend, layer=1):
    pool = case.pool()
    return pool, torch.cat(case.forward(case.attention(backend, pool), case.everything(), layer))


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize(
    "settings",
    [
        {"heads": (4, 2)},
        {"heads": (9, 3), "block_size": 8},
        {"heads": (2, 1), "head_dim": 80, "window": 9},
    ],
    ids=str,
)
def test_a_split_bias_gives_what_an_inline_one_gives(backend, settings):
    inline, split = arms(lengths=(5, 40, 65), **settings)
    want, got = attend(inline, backend)[1], attend(split, backend)[1]
    assert torch.allclose(got, want, atol=1e-5, rtol=0)
    without = Case("fp32", lengths=(5, 40, 65), **settings)
    assert not torch.allclose(attend(without, backend)[1], want, atol=1e-2, rtol=0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_split_biases_agree_with_the_reference_in_bytes_and_outputs(fmt):
    _, case = arms(fmt, size=20.0, lengths=RAGGED)
    (pool, out), (want_pool, want) = attend(case, "numba"), attend(case, "reference")
    assert torch.equal(pool, want_pool)
    assert torch.allclose(out, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_head_dims_agree_with_the_reference_in_bf16(head_dim):
    _, case = arms("int8", size=5.0, heads=(6, 2), head_dim=head_dim, lengths=(5, 50), dtype=torch.bfloat16)
    (pool, out), (want_pool, want) = attend(case, "numba"), attend(case, "reference")
    assert torch.equal(pool, want_pool)
    assert torch.allclose(out.float(), want.float(), atol=4e-3, rtol=8e-3)


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_stored_does_not_depend_on_a_split_bias(fmt):
    _, case = arms(fmt, size=600.0, lengths=(40,))
    assert torch.equal(attend(case, "numba")[0], attend(Case(fmt, lengths=(40,)), "numba")[0])


def test_layers_without_a_split_bias_are_computed_as_ever():
    _, case = arms("int8", size=50.0, lengths=(40,), layers=(0,))
    plain = Case("int8", lengths=(40,))
    assert torch.equal(attend(case, "numba", layer=1)[1], attend(plain, "numba", layer=1)[1])
    assert not torch.equal(attend(case, "numba", layer=0)[1], attend(plain, "numba", layer=0)[1])


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_rows_with_split_biases_are_bit_equal_alone_in_a_batch_and_in_any_chunking(fmt):
    _, case = arms(fmt, size=30.0, heads=(6, 2), lengths=(49, 33, 7, 64), window=41)
    assert_bit_equal_in_any_chunking(case)


def relative_error(case, exact):
    """Of the attention's output, against the same attention over unrounded keys and values."""
    return float((attend(case, "numba")[1] - exact).norm() / exact.norm())


@pytest.mark.parametrize(("fmt", "factor"), [("int8", 20), ("fp8_e4m3", 4), ("fp8_e5m2", 2)])
def test_a_large_bias_costs_an_inline_format_its_accuracy_and_a_split_one_nothing(fmt, factor):
    """As in Qwen2, the bias is on channels that RoPE turns slowly: the scores that it adds hardly differ, so the
    softmax is that of the bias-free keys, as long as these survive."""
    settings = {"heads": (4, 2), "head_dim": 64, "lengths": (300,)}
    plain, inline, split = (Case(fmt, **settings) for _ in range(3))
    channels, bias = torch.tensor([29, 31, 62, 64 + 30, 64 + 61, 64 + 63]), torch.zeros(128)
    bias[channels] = torch.tensor([300.0, -450.0, 600.0, -300.0, 500.0, -600.0])
    inline.qkv[0][:, 256:384] += bias
    split.spec = replace(split.spec, key_bias=(None, bias))
    errors = {}
    for name, case in (("plain", plain), ("inline", inline), ("split", split)):
        exact = Case("fp32", **settings)
        case.cos, case.sin = rope_tables(300, 64, theta=1e6)
        exact.qkv, exact.spec, exact.cos, exact.sin = case.qkv, case.spec, case.cos, case.sin
        errors[name] = relative_error(case, attend(exact, "reference")[1])
    print(f"\n{fmt}: relative error " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()))
    assert errors["split"] < 1.05 * errors["plain"]
    assert errors["inline"] > factor * errors["split"]


def test_saturated_and_nonfinite_elements_are_counted_by_layer():
    for backend in ("numba", "reference"):
        case = Case("fp8_e4m3", lengths=(20,))
        case.qkv[0][3, -1], case.qkv[0][4, -1], case.qkv[0][5, -1] = 500.0, -1e9, torch.nan
        attention = case.attention(backend, case.pool())
        for layer in (1, 1, 0):
            case.forward(attention, case.everything(), layer)
        assert attention.kv_counts() == [(2, 1), (4, 2)]
        assert (attention.kv_saturated_total, attention.kv_nonfinite_total) == (6, 3)


def test_a_split_bias_keeps_large_biases_from_saturating():
    inline, split = arms("fp8_e4m3", size=2000.0, lengths=(20,))
    counted = []
    for case in (inline, split):
        attention = case.attention("numba", case.pool())
        case.forward(attention, case.everything())
        counted.append(attention.kv_saturated_total)
    assert counted[0] > 300
    assert counted[1] == 0


def test_a_bias_that_cannot_be_split_is_refused():
    norms = tuple((torch.ones(16), torch.ones(16)) for _ in range(2))
    common = {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25, "windows": (0, 0)}
    with pytest.raises(ValueError, match="not linear"):
        AttentionSpec(**common, qk_norm=norms, key_bias=(torch.zeros(32), None))
    with pytest.raises(ValueError, match="1 key biases for 2 layers"):
        AttentionSpec(**common, key_bias=(torch.zeros(32),))
    with pytest.raises(ValueError, match=r"layer 1 must be contiguous fp32 \[32\], not torch.bfloat16 \(32,\)"):
        AttentionSpec(**common, key_bias=(None, torch.zeros(32, dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match=r"not torch.float32 \(16,\)"):
        AttentionSpec(**common, key_bias=(torch.zeros(16), None))
