"""Key biases of whole models: split equals inline, keeps quantised keys whole, and is chosen where it pays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from executor_runner import Runner
from gguf_files import GGUFModelFile
from reference import load_reference, teacher_forced_logits
from tiny_checkpoints import random_ids, save, tiny_model
from transformers import PreTrainedModel

from deepinfer.kernels import resolve_kv_format
from deepinfer.stages.model import Model, load_model, open_checkpoint
from deepinfer.stages.model.key_bias import TOLERATED, KeyBiasRule

IDS = random_ids(120)
ROPE = {"rope_type": "default", "rope_theta": 1e6}
CHANNELS = torch.tensor([14, 31, 32 + 15, 32 + 30])
"""Of the 2 x 32 key channels, some that RoPE turns slowly, as Qwen2's biased ones are."""


def biased(size: float) -> PreTrainedModel:
    """A tiny Qwen2 with ordinary biases, and on four key channels of the first and the last layer +-size to 2 size."""
    model = tiny_model("qwen2", rope_parameters=ROPE)
    with torch.no_grad():
        for layer in (0, 2):
            bias = model.model.layers[layer].self_attn.k_proj.bias
            bias[CHANNELS] += size * torch.tensor([1.0, -1.5, 2.0, -1.0])
    return model


def load(folder: Path, mode: str, kv_format: str = "auto", dtype: str = "fp32") -> Model:
    codec = resolve_kv_format(kv_format, dtype).k
    return load_model(open_checkpoint(folder), dtype=dtype, key_bias=KeyBiasRule(mode, codec))


def logits(model: Model, kv_format: str = "auto", backend: str = "numba") -> torch.Tensor:
    """[120, vocab]: a prompt of 45 tokens, then chunks of 25."""
    runner = Runner(model, backend, kv_format)
    pieces = [IDS[:45], *(IDS[at : at + 25] for at in range(45, 120, 25))]
    return torch.cat([runner.feed({0: piece}, all_rows=True) for piece in pieces])


def divergence(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence over the rows, in nats."""
    return float(
        torch.nn.functional.kl_div(got.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean")
    )


def split_layers(model: Model) -> list[int]:
    report = model.describe()["kv_key_bias"]
    assert isinstance(report, dict)
    return report["split_layers"]


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_split_biases_give_the_logits_of_transformers(backend: str, tmp_path: Path) -> None:
    folder = save(tiny_model("qwen2"), tmp_path)
    expected = teacher_forced_logits(load_reference(folder), IDS)
    model = load(folder, "split")
    assert split_layers(model) == [0, 1, 2]
    assert (logits(model, backend=backend) - expected).abs().max() <= 1e-4


def test_the_large_biases_of_split_layers_give_the_logits_of_transformers(tmp_path: Path) -> None:
    folder = save(biased(300.0), tmp_path)
    expected = teacher_forced_logits(load_reference(folder), IDS)
    for mode in ("inline", "split"):
        assert (logits(load(folder, mode)) - expected).abs().max() <= 1e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("kv_format", "factor"), [("int8", 100), ("fp8_e4m3", 10), ("fp8_e5m2", 3), ("int8/fp8_e4m3", 10)]
)
def test_quantised_keys_lose_no_more_with_a_split_bias_than_without_one(
    kv_format: str, factor: int, tmp_path: Path
) -> None:
    loss = {}
    for name, size, mode in (("no bias", 0.0, "inline"), ("inline", 300.0, "inline"), ("split", 300.0, "split")):
        folder = save(biased(size), tmp_path / name)
        exact = logits(load(folder, "inline"))
        loss[name] = divergence(logits(load(folder, mode, kv_format), kv_format), exact)
    print(f"\n{kv_format}: KLD " + ", ".join(f"{name} {value:.2e}" for name, value in loss.items()))
    assert loss["split"] < 1.3 * loss["no bias"]
    assert loss["inline"] > factor * loss["split"]


def test_bf16_compute_loses_no_more_with_a_split_bias_than_without_one(tmp_path: Path) -> None:
    loss = {}
    for name, size, mode in (("no bias", 0.0, "inline"), ("inline", 300.0, "inline"), ("split", 300.0, "split")):
        folder = save(biased(size), tmp_path / name)
        exact = logits(load(folder, "inline"))
        loss[name] = divergence(logits(load(folder, mode, dtype="bf16")), exact)
    print("\nbf16: KLD " + ", ".join(f"{name} {value:.2e}" for name, value in loss.items()))
    assert loss["split"] < 1.3 * loss["no bias"]
    assert loss["inline"] > 10 * loss["split"]


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8_e4m3"])
def test_split_rows_are_bit_equal_alone_chunked_and_in_a_batch(kv_format: str, tmp_path: Path) -> None:
    model = load(save(biased(300.0), tmp_path), "split", kv_format)
    prompts = [random_ids(n, seed=n) for n in (7, 33, 64)]
    together = Runner(model, "numba", kv_format, sequences=3).feed(dict(enumerate(prompts)), all_rows=True)
    first = 0
    for prompt in prompts:
        for chunk in (1, 19):
            runner = Runner(model, "numba", kv_format)
            pieces = [prompt[at : at + chunk] for at in range(0, len(prompt), chunk)]
            alone = torch.cat([runner.feed({0: piece}, all_rows=True) for piece in pieces])
            assert torch.equal(alone, together[first : first + len(prompt)])
        first += len(prompt)


@pytest.mark.parametrize(
    ("size", "kv_format", "dtype", "expected"),
    [
        (300.0, "int8", "fp32", [0, 2]),
        (300.0, "fp8_e4m3", "fp32", [0, 2]),
        (300.0, "fp8_e5m2", "fp32", [0, 2]),
        (300.0, "fp16", "fp32", [0, 2]),
        (300.0, "auto", "bf16", [0, 2]),
        (300.0, "auto", "fp32", []),
        (10.0, "int8", "fp32", [0, 2]),
        (10.0, "fp16", "fp32", []),
        (0.0, "int8", "fp32", []),
        (0.0, "auto", "bf16", []),
    ],
)
def test_auto_splits_the_layers_whose_bias_the_format_cannot_bear(
    size: float, kv_format: str, dtype: str, expected: list[int], tmp_path: Path
) -> None:
    model = load(save(biased(size), tmp_path), "auto", kv_format, dtype)
    assert split_layers(model) == expected
    biases = [layer.key_bias for layer in model.layers]
    assert [bias is not None and bias.split for bias in biases] == [layer in expected for layer in range(3)]
    if expected:
        errors = [(bias.inline_error, bias.split_error) for bias in biases if bias is not None and bias.split]
        assert all(inline > TOLERATED and inline > 1.25 * split for inline, split in errors)


def test_status_shows_norms_errors_and_choices_and_the_log_does_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        model = load(save(biased(300.0), tmp_path), "auto", "int8")
    report = model.describe()["kv_key_bias"]
    assert isinstance(report, dict)
    assert (report["mode"], report["split_layers"]) == ("auto", [0, 2])
    norms = [entry["norm"] for entry in report["layers"]]
    assert norms[0] == pytest.approx(300 * (1 + 1.5**2 + 2**2 + 1) ** 0.5, rel=0.01)
    assert norms[1] < 2
    assert [entry["choice"] for entry in report["layers"]] == ["split", "inline", "split"]
    assert f"layer 0: key bias of norm {norms[0]:.2f}" in caplog.text
    assert caplog.text.count(": split\n") == 2


def test_a_model_with_a_key_norm_keeps_its_bias_and_says_why(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3", attention_bias=True), tmp_path)
    model = load(folder, "split", "int8")
    report = model.describe()["kv_key_bias"]
    assert isinstance(report, dict)
    assert report["split_layers"] == report["layers"] == []
    assert "normalised after the bias" in report["reason"]
    expected = teacher_forced_logits(load_reference(folder), IDS)
    assert (logits(model) - expected).abs().max() <= 1e-4


def test_a_model_without_key_biases_has_nothing_to_split(tmp_path: Path) -> None:
    model = load(save(tiny_model("llama"), tmp_path), "split", "int8")
    assert model.attention_spec().key_bias is None
    assert model.describe()["kv_key_bias"] == {
        "mode": "split",
        "reason": "the model has no key biases",
        "split_layers": [],
        "layers": [],
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_four_bit_weights_leave_a_split_bias_to_the_attention(dtype: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("qwen2", **wide), "qwen2", "Q4_1").write()
    split, inline = load(file, "split", dtype=dtype), load(file, "inline", dtype=dtype)
    assert split.layers[0].qkv.kind.split()[0] == ("w4a16" if dtype == "bf16" else "dense")
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(split.torch_dtype)
    bias = split.layers[0].key_bias
    assert bias is not None
    difference = (inline.layers[0].qkv(x).float() - split.layers[0].qkv(x).float())[0]
    assert torch.allclose(difference[256:384], bias.values, atol=0.05 if dtype == "bf16" else 1e-5)
    assert not difference[:256].any()
    assert not difference[384:].any()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_key_bias 'both' is unknown; known: auto, inline, split"):
        KeyBiasRule("both", resolve_kv_format("int8").k)
