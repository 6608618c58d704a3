"""A checkpoint that is broken or unsupported is refused, and the message names file, tensor or field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save, tiny_model

from deepinfer.stages.model import (
    CheckpointError,
    ModelNotFoundError,
    UnsupportedModelError,
    load_model,
    open_checkpoint,
)

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save(tiny_model("llama"), tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(tiny_model("llama"), tmp_path, shard="60KB")


def _edit_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = _weight_map(sharded)[UP]
    (sharded / shard).unlink()
    with pytest.raises(CheckpointError, match=shard):
        open_checkpoint(sharded)


def test_a_stray_shard_is_named(sharded: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded / "model-00099-of-00099.safetensors")
    with pytest.raises(CheckpointError, match="stray shard model-00099-of-00099"):
        open_checkpoint(sharded)


def test_a_missing_index_is_named(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"without {INDEX}"):
        open_checkpoint(sharded)


def test_a_tensor_that_the_index_does_not_know_is_named(sharded: Path) -> None:
    weight_map = _weight_map(sharded)
    shard = weight_map.pop(UP)
    _edit_json(sharded / INDEX, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=f"{shard}: stray tensor {UP}"):
        open_checkpoint(sharded)


def test_a_tensor_that_the_index_places_in_another_shard_is_named(sharded: Path) -> None:
    weight_map = _weight_map(sharded)
    weight_map[UP] = next(shard for shard in weight_map.values() if shard != weight_map[UP])
    _edit_json(sharded / INDEX, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=UP):
        open_checkpoint(sharded)


def test_an_index_that_promises_a_tensor_nobody_holds_is_refused(sharded: Path) -> None:
    weight_map = _weight_map(sharded)
    shard = weight_map[UP]
    _edit_tensors(sharded / shard, lambda tensors: tensors.pop(UP))
    with pytest.raises(CheckpointError, match=f"places tensor {UP} in {shard}"):
        open_checkpoint(sharded)


def test_an_index_cannot_reach_outside_the_folder(sharded: Path) -> None:
    _edit_json(sharded / INDEX, weight_map={**_weight_map(sharded), UP: "../elsewhere.safetensors"})
    with pytest.raises(CheckpointError, match="no file name inside the folder"):
        open_checkpoint(sharded)


def test_a_missing_tensor_is_named(single: Path) -> None:
    _edit_tensors(single / "model.safetensors", lambda tensors: tensors.pop(UP))
    with pytest.raises(CheckpointError, match=f"tensor {UP} is missing"):
        open_checkpoint(single)


def test_a_stray_tensor_is_named(single: Path) -> None:
    _edit_tensors(single / "model.safetensors", lambda tensors: tensors.update({"model.extra": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"stray tensor model\.extra"):
        open_checkpoint(single)


def test_frequencies_that_old_checkpoints_store_are_no_stray_tensors(single: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _edit_tensors(single / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(16)}))
    assert load_model(open_checkpoint(single)).config.num_layers == 3


def test_a_wrong_shape_is_named_with_both_shapes(single: Path) -> None:
    _edit_tensors(single / "model.safetensors", lambda tensors: tensors.update({UP: torch.zeros(95, 64)}))
    with pytest.raises(CheckpointError, match=rf"{UP} has shape \[95, 64\], expected \[96, 64\]"):
        open_checkpoint(single)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [UP, "model.norm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_non_finite_weight_is_named_when_it_is_read(single: Path, name: str, value: float, dtype: str) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[7] = value

    _edit_tensors(single / "model.safetensors", poison)
    with pytest.raises(CheckpointError, match=f"{single}.*: tensor {name} holds NaN or infinite"):
        load_model(open_checkpoint(single), dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_non_finite_weight_is_named_with_its_shard(sharded: Path, dtype: str) -> None:
    shard = _weight_map(sharded)[UP]
    _edit_tensors(sharded / shard, lambda tensors: tensors[UP].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"{shard}: tensor {UP} holds NaN or infinite"):
        load_model(open_checkpoint(sharded), dtype)


def test_an_unsupported_dtype_is_named(single: Path) -> None:
    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)

    _edit_tensors(single / "model.safetensors", shrink)
    with pytest.raises(UnsupportedModelError, match=f"{UP} has dtype F8_E4M3"):
        open_checkpoint(single)


def test_a_cut_file_is_refused(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        open_checkpoint(single)


def test_a_folder_with_pickled_weights_only_is_refused_without_opening_them(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin"):
        open_checkpoint(single)


def test_a_folder_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(single)


def test_an_untied_checkpoint_without_a_head_is_refused(single: Path) -> None:
    _edit_tensors(single / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing and tie_word_embeddings is false"):
        open_checkpoint(single)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tied_head_may_be_stored_when_it_is_the_embedding(dtype: str, tmp_path: Path) -> None:
    folder = save(tiny_model("qwen2", tie_word_embeddings=True), tmp_path)

    def store(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _edit_tensors(folder / "model.safetensors", store)
    assert load_model(open_checkpoint(folder), dtype).head_is_embedding


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tied_head_that_differs_from_the_embedding_is_refused(dtype: str, tmp_path: Path) -> None:
    folder = save(tiny_model("qwen2", tie_word_embeddings=True), tmp_path)

    def store(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    _edit_tensors(folder / "model.safetensors", store)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, yet lm_head.weight differs"):
        load_model(open_checkpoint(folder), dtype)


REFUSED = {
    "family": ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, mistral"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "an activation that is no name": ({"hidden_act": []}, r"hidden_act \[\]"),
    "quantisation": ({"quantization_config": {"quant_method": "fp8"}}, "quantisation 'fp8'"),
    "dynamic rope": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    "partial rotation": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5 is not supported for this family",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_unsupported_is_refused_by_name_before_weights_are_looked_at(what: str, single: Path) -> None:
    fields, message = REFUSED[what]
    _edit_json(single / "config.json", **fields)
    (single / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(single)


WRONG = {
    "a missing size": ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    "a wrong type": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
    "heads without a size": ({"num_attention_heads": 128, "head_dim": None}, "the head size is 0, expected"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "1000000000 layers, expected at most 1000"),
    "an infinite theta": ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf"),
    "a missing factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor of rope_type linear is None"),
    "longrope without its factors": (
        {"rope_scaling": {"type": "longrope"}},
        "short_factor of rope_type longrope is None",
    ),
    "a bad end token": ({"eos_token_id": [2, -1]}, "eos_token_id -1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_configuration_that_makes_no_sense_names_its_field(what: str, single: Path) -> None:
    fields, message = WRONG[what]
    _edit_json(single / "config.json", **fields)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(single)


def test_broken_json_names_its_file(single: Path) -> None:
    (single / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        open_checkpoint(single)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(("argument", "value"), [("dtype", "fp8"), ("w4_prefill", "int8")])
def test_an_unknown_loading_option_is_refused_with_the_known_ones(single: Path, argument: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} '{value}' is unknown; known: "):
        load_model(open_checkpoint(single), **{argument: value})


def test_loading_reports_every_byte_once(single: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    checkpoint = open_checkpoint(single)
    load_model(checkpoint, progress=lambda *step: seen.append(step))
    done = [step[1] for step in seen]
    assert done == sorted(set(done))
    assert seen[-1] == ("weights", seen[0][2], checkpoint.describe()["file_bytes"])
