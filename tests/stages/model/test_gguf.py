"""GGUF files: header, types, kept 4-bit codes, row order, RoPE metadata, refusals."""

from __future__ import annotations

from array import array
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from executor_runner import Runner
from gguf_files import GGUFModelFile, gguf_name, interleaved, llama3_divisors, quantised
from reference import teacher_forced_logits
from test_parity import CAPS, LINEAR, LLAMA3, NO_IDS, YARN, longrope, partial, partial_longrope
from tiny_checkpoints import random_ids, tiny_model

from deepinfer.stages.model import (
    Checkpoint,
    Model,
    load_model,
    open_checkpoint,
)
from deepinfer.stages.model.gguf_header import read_header
from deepinfer.stages.model.gguf_source import SUPPORTED_TYPES
from deepinfer.stages.model.precision import keeps_bf16_copies

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
UP, Q = "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"


def _reference_dequantised(file: Path, name: str) -> torch.Tensor:
    tensor = next(t for t in gguf.GGUFReader(str(file)).tensors if t.name == gguf_name(name))
    dense = gguf.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(dense.reshape(tensor.shape[::-1].tolist()).copy())


def test_the_header_reader_agrees_with_the_gguf_package_on_the_real_model(smollm2_path: Path) -> None:
    ours, theirs = read_header(smollm2_path), gguf.GGUFReader(str(smollm2_path))
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.offset, found.nbytes, found.type_id) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type,
        )
        assert list(found.shape) == tensor.shape[::-1].tolist()
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        expected = field.contents()
        strings = isinstance(expected, list) and isinstance(expected[0], str)
        found = ours.metadata[key]
        assert (list(found) if isinstance(found, array) else found) == (len(expected) if strings else expected), key


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_every_type_dequantises_to_exactly_what_the_gguf_package_gives(type_name: str, tmp_path: Path) -> None:
    model = tiny_model("qwen2", **WIDE)
    file = GGUFModelFile(tmp_path / "m.gguf", model, "qwen2", type_name).write()
    source = open_checkpoint(file).source
    for name, header in source.headers.items():
        assert header.dtype in (type_name, "F32")
        assert torch.equal(source.read(name).float(), _reference_dequantised(file, name)), name


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q4_K"])
def test_four_bit_codes_with_their_scales_are_exactly_the_dequantised_weights(type_name: str, tmp_path: Path) -> None:
    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("qwen2", **WIDE), "qwen2", type_name).write()
    groups = open_checkpoint(file).source.read_int4(UP)
    assert groups is not None
    codes = groups.codes.reshape(512, -1, 32).astype(np.float32)
    weights = codes * groups.scales[..., None] + groups.minima[..., None]
    assert np.array_equal(weights.reshape(512, 256), _reference_dequantised(file, UP).numpy())


@pytest.mark.parametrize(("type_name", "head", "size"), [("Q4_0", 2, 18), ("Q4_1", 4, 20)])
def test_codes_are_the_nibbles_of_the_file(type_name: str, head: int, size: int, tmp_path: Path) -> None:
    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("qwen2", **WIDE), "qwen2", type_name).write()
    raw = next(t.data for t in gguf.GGUFReader(str(file)).tensors if t.name == gguf_name(UP))
    groups = open_checkpoint(file).source.read_int4(UP)
    assert groups is not None
    for row, group in ((0, 0), (3, 5), (511, 7)):
        block = raw[row, group * size + head : (group + 1) * size].tolist()
        nibbles = [byte & 15 for byte in block] + [byte >> 4 for byte in block]
        assert groups.codes[row, group * 32 : (group + 1) * 32].tolist() == nibbles


@pytest.mark.parametrize("tied", [True, False])
def test_8_bit_embedding_and_head_keep_their_codes_and_give_fp32_logits(tied: bool, tmp_path: Path) -> None:
    file = GGUFModelFile(
        tmp_path / "m.gguf", tiny_model("llama", **WIDE, tie_word_embeddings=tied), "llama", "Q8_0"
    ).write()
    checkpoint = open_checkpoint(file)
    table = checkpoint.source.read("model.embed_tokens.weight")
    model = load_model(checkpoint)
    assert model.head.kind.split()[0] == "w8a16"
    assert model.embedding.kind == ("rows of the head" if tied else "int8 groups")
    ids = torch.tensor([5, 0, 159, 5], dtype=torch.int32)
    assert torch.equal(model.embedding(ids), table[ids])
    hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = table if tied else _reference_dequantised(file, "lm_head.weight")
    logits = model.head(hidden)
    assert logits.dtype == torch.float32
    assert (logits - hidden.float() @ weight.T).abs().max() < 1e-4
    assert checkpoint.weight_bytes_estimate == pytest.approx(_bytes_in_memory(checkpoint, model), rel=0.02)


def test_types_without_four_bit_groups_offer_no_codes(tmp_path: Path) -> None:
    for type_name in ("Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "F16"):
        file = GGUFModelFile(tmp_path / type_name, tiny_model("qwen2", **WIDE), "qwen2", type_name).write()
        assert open_checkpoint(file).source.read_int4(UP) is None


@pytest.mark.parametrize(
    ("family", "architecture", "overrides"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", "llama", {"tie_word_embeddings": True}),
        ("mistral", "llama", {"sliding_window": None}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {"tie_word_embeddings": True}),
        ("olmo2", "olmo2", {}),
        ("smollm3", "smollm3", {"num_hidden_layers": 5, **NO_IDS}),
        ("phi3", "phi3", NO_IDS),
    ],
)
def test_a_float_file_gives_the_logits_of_the_model_it_came_from(
    family: str, architecture: str, overrides: dict, tmp_path: Path
) -> None:
    model = tiny_model(family, **overrides)
    file = GGUFModelFile(tmp_path / "m.gguf", model, architecture).write()
    ids = random_ids(60)
    loaded = load_model(open_checkpoint(file))
    assert loaded.compute_dtype == "fp32"
    got = Runner(loaded).feed({0: ids}, all_rows=True)
    assert (got - teacher_forced_logits(model, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("family", "architecture", "overrides"),
    [
        ("mistral", "llama", {}),
        ("phi3", "phi3", NO_IDS),
        ("gemma2", "gemma2", {"query_pre_attn_scalar": 32, **CAPS}),
        ("gemma3_text", "gemma3", {"query_pre_attn_scalar": 32, "num_hidden_layers": 7}),
    ],
)
def test_windows_and_soft_caps_in_the_metadata_are_kept(
    family: str, architecture: str, overrides: dict, tmp_path: Path
) -> None:
    model = tiny_model(family, sliding_window=20, **overrides)
    file = GGUFModelFile(tmp_path / "m.gguf", model, architecture)
    file.writer.add_sliding_window(20)
    if family == "gemma2":
        file.writer.add_attn_logit_softcapping(CAPS["attn_logit_softcapping"])
        file.writer.add_final_logit_softcapping(CAPS["final_logit_softcapping"])
    ids = random_ids(60)
    got = Runner(load_model(open_checkpoint(file.write()))).feed({0: ids}, all_rows=True)
    assert (got - teacher_forced_logits(model, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("family", "architecture", "overrides"),
    [
        ("olmo2", "olmo2", {}),
        ("smollm3", "smollm3", NO_IDS),
        ("phi3", "phi3", NO_IDS),
        ("gemma2", "gemma2", {"sliding_window": 20}),
    ],
)
def test_codes_of_every_family_are_multiplied_as_they_are(
    family: str, architecture: str, overrides: dict, tmp_path: Path
) -> None:
    model = tiny_model(family, **WIDE, **overrides)
    file = GGUFModelFile(tmp_path / "m.gguf", model, architecture, "Q4_1")
    file.writer.add_sliding_window(20)
    path = file.write()
    packed, exact = load_model(open_checkpoint(path)), load_model(open_checkpoint(path), dtype="fp32")
    assert all("w4a16" in linear.kind for layer in packed.layers for linear in layer.linears)
    ids = random_ids(40)
    expected = Runner(exact).feed({0: ids}, all_rows=True)
    got = Runner(packed).feed({0: ids}, all_rows=True)
    assert 0 < (got - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


def test_rope_scaling_metadata_gives_the_logits_of_the_model_it_came_from(tmp_path: Path) -> None:
    for rope in (LINEAR, YARN, LLAMA3):
        model = tiny_model("llama", rope_parameters=rope)
        file = GGUFModelFile(tmp_path / rope["rope_type"], model, "llama")
        if rope is LLAMA3:
            plain = rope["rope_theta"] ** -(np.arange(0, 32, 2) / 32)
            file.tensors["rope_freqs.weight"] = (llama3_divisors(plain, rope), "F32")
        else:
            file.writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            file.writer.add_rope_scaling_factor(rope["factor"])
            file.writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 512))
        checkpoint = open_checkpoint(file.write())
        assert checkpoint.config.rope.rope_type == rope["rope_type"]
        ids = random_ids(100)
        got = Runner(load_model(checkpoint)).feed({0: ids}, all_rows=True)
        assert (got - teacher_forced_logits(model, ids)).abs().max() <= 1e-4, rope


@pytest.mark.parametrize("original", [64, 256])
@pytest.mark.parametrize("rotated", [12, 16])
def test_longrope_factors_are_read_from_their_tensors(rotated: int, original: int, tmp_path: Path) -> None:
    fields = longrope(original) if rotated == 16 else partial_longrope(original)
    model = tiny_model("phi3", **NO_IDS, **fields)
    file = GGUFModelFile(tmp_path / "m.gguf", model, "phi3")
    file.writer.add_rope_scaling_orig_ctx_len(original)
    if rotated != 16:
        file.writer.add_rope_dimension_count(rotated)
    for name in ("short", "long"):
        factors = np.array(fields["rope_parameters"][f"{name}_factor"], np.float32)
        file.tensors[f"rope_factors_{name}.weight"] = (factors, "F32")
    ids = random_ids(100)
    got = Runner(load_model(open_checkpoint(file.write()))).feed({0: ids}, all_rows=True)
    assert (got - teacher_forced_logits(model, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize("w4_prefill", ["bf16", "int4"])
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q4_K"])
def test_four_bit_files_run_packed_in_bf16_near_their_fp32_logits(
    type_name: str, w4_prefill: str, tmp_path: Path
) -> None:
    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("llama", **WIDE), "llama", type_name).write()
    packed = load_model(open_checkpoint(file), w4_prefill=w4_prefill)
    assert packed.compute_dtype == "bf16"
    assert all("w4a16" in linear.kind for layer in packed.layers for linear in layer.linears)
    exact = load_model(open_checkpoint(file), dtype="fp32")
    ids = random_ids(80)
    expected = Runner(exact).feed({0: ids}, all_rows=True)
    many = Runner(packed).feed({0: ids}, all_rows=True)
    few = Runner(packed)
    few_rows = torch.cat([few.feed({0: ids[at : at + 8]}, all_rows=True) for at in range(0, 80, 8)])
    for got in (many, few_rows):
        assert 0 < (got - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


def test_codes_of_a_model_that_rotates_a_part_of_each_head_are_those_of_its_fp32_logits(tmp_path: Path) -> None:
    part = partial(0.75, {"rope_type": "default"})
    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("phi3", **{**NO_IDS, **part, **WIDE}), "phi3", "Q4_1")
    file.writer.add_rope_dimension_count(48)
    path, ids = file.write(), random_ids(40)
    packed, exact = load_model(open_checkpoint(path)), load_model(open_checkpoint(path), dtype="fp32")
    assert all("w4a16" in linear.kind for layer in packed.layers for linear in layer.linears)
    got, expected = (Runner(model).feed({0: ids}, all_rows=True) for model in (packed, exact))
    assert 0 < (got - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


def test_a_mixed_file_keeps_codes_where_it_can_and_says_so(tmp_path: Path) -> None:
    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("llama", **WIDE), "llama", "Q4_K")
    name = "blk.0.ffn_down.weight"
    file.tensors[name] = (quantised(np.zeros((256, 512), np.float32), "Q6_K"), "Q6_K")
    name = "blk.1.attn_v.weight"
    file.tensors[name] = (quantised(np.zeros((128, 256), np.float32), "Q6_K"), "Q6_K")
    checkpoint = open_checkpoint(file.write())
    model = load_model(checkpoint, w4_prefill="int4")
    kinds = model.describe()["linears"]
    assert {kind.split()[0]: count for kind, count in kinds.items()} == {"w4a16": 6, "dense": 2}
    assert checkpoint.weight_bytes_estimate == pytest.approx(_bytes_in_memory(checkpoint, model), rel=0.02)


def _bytes_in_memory(checkpoint: Checkpoint, model: Model) -> int:
    return model.weight_bytes + sum(
        4 * header.shape[0] for header in checkpoint.source.headers.values() if len(header.shape) == 1
    )


def test_the_estimate_of_weight_bytes_is_what_loading_takes(tmp_path: Path) -> None:
    for type_name, dtype in (("F16", "bf16"), ("Q4_1", "fp32"), ("Q4_1", "bf16")):
        path = tmp_path / f"{type_name}-{dtype}"
        checkpoint = open_checkpoint(GGUFModelFile(path, tiny_model("llama", **WIDE), "llama", type_name).write())
        model = load_model(checkpoint, dtype=dtype, w4_prefill="int4")
        expected = _bytes_in_memory(checkpoint, model)
        assert checkpoint.estimate_weight_bytes(dtype) == pytest.approx(expected, rel=0.02)
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, batch_invariant=False, w4_prefill="bf16")
    expected = _bytes_in_memory(checkpoint, model)
    assert checkpoint.estimate_weight_bytes("auto", bf16_copies=keeps_bf16_copies("bf16")) == pytest.approx(
        expected, rel=0.02
    )


def test_interleaving_is_undone_for_llama_alone(tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        model = tiny_model(family)
        source = open_checkpoint(GGUFModelFile(tmp_path / family, model, family).write()).source
        stored = dict(model.named_parameters())[Q].detach()
        assert torch.equal(source.read(Q), stored)
    assert not np.array_equal(interleaved(stored.numpy(), 4), stored.numpy())
