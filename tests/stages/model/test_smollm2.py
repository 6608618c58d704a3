"""The real model: greedy ids equal those of transformers in fp32; packed 4-bit weights stay near its
distribution.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from executor_runner import Runner
from reference import greedy_ids, teacher_forced_logits
from transformers import PreTrainedModel

from deepinfer.kernels.devices import open_device
from deepinfer.stages.model import Checkpoint, Model, Tokenizer, load_model, load_tokenizer, open_checkpoint

PROMPTS = ["def fibonacci(n):\n", "你好！请介绍一下北京的历史。"]
CHATS = ["Write a haiku about rain 🌧️."]
TEXT = """
The harbour was quiet in the morning. Two boats had come in during the night and lay side by side at
the stone wall, their nets still wet. A man with a red cap walked along the pier, counted the
crates, wrote the number down in a small book and asked the nearest sailor how far out they had been
this time. Forty miles, said the sailor, and not one of them was worth the fuel. Prices had fallen
again since the spring; a crate of mackerel brought in less than the ice it was packed in. In the
town the bakery opened at six, the school at eight, and the bank, which had once closed at noon, now
opened only on Tuesdays and Thursdays.
"""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def exact(smollm2_path: Path) -> Model:
    return load_model(open_checkpoint(smollm2_path), dtype="fp32")


def test_greedy_ids_in_fp32_equal_those_of_transformers(
    reference: PreTrainedModel, tokenizer: Tokenizer, exact: Model
) -> None:
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    prompts += [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHATS]
    for prompt in prompts:
        expected = greedy_ids(reference, prompt, 64)
        got = Runner(exact, "numba").greedy(prompt, 64, exact.config.eos_token_ids)
        assert got == expected, tokenizer.decode(prompt)


def _divergence(logits: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Mean KL divergence in nats and the share of equal top-1 tokens."""
    kld = F.kl_div(logits.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    agree = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
    return kld.mean().item(), agree.item()


@pytest.mark.parametrize("w4_prefill", ["bf16", "int4"])
def test_packed_weights_in_bf16_stay_near_the_fp32_distribution(
    w4_prefill: str, smollm2_path: Path, reference: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    model = load_model(open_checkpoint(smollm2_path), w4_prefill=w4_prefill)
    (kind,) = model.describe()["linears"]
    assert kind.startswith("w4a16")
    assert kind.endswith(("+ bf16 copy", "+ rounded to bf16")) == (w4_prefill == "bf16")
    got = Runner(model, "numba", "fp16").feed({0: ids}, all_rows=True)
    kld, agree = _divergence(got, teacher_forced_logits(reference, ids))
    print(f"{w4_prefill}: mean KL {kld:.2e} nats, top-1 {100 * agree:.1f} % over {len(ids)} positions")
    assert kld < 3e-3
    assert agree > 0.95


def test_activations_of_8_bits_stay_near_those_of_bf16(
    smollm2_path: Path, reference: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    rows = {}
    for name in ("auto", "int8"):
        model = load_model(open_checkpoint(smollm2_path), ops=open_device("cpu", name))
        (kind,) = model.describe()["linears"]
        assert kind.startswith("w4a16 " if name == "auto" else "w4a8 int8 dot")
        rows[name] = Runner(model, "numba", "fp16").feed({0: ids}, all_rows=True)
    kld, agree = _divergence(rows["int8"], rows["auto"])
    print(f"int8 activations: mean KL {kld:.2e} nats, top-1 {100 * agree:.1f} % over {len(ids)} positions")
    assert 0 < kld < 1e-2
    assert agree > 0.93
    kld, agree = _divergence(rows["int8"], teacher_forced_logits(reference, ids))
    assert kld < 1e-2


def test_loading_the_real_model_keeps_every_code(smollm2_path: Path) -> None:
    checkpoint: Checkpoint = open_checkpoint(smollm2_path)
    groups = checkpoint.source.read_int4("model.layers.7.mlp.down_proj.weight")
    assert groups is not None
    weights = groups.codes.reshape(576, -1, 32) * groups.scales[..., None] + groups.minima[..., None]
    dense = checkpoint.source.read("model.layers.7.mlp.down_proj.weight").numpy()
    assert np.array_equal(weights.reshape(576, 1536).astype(np.float32), dense)
