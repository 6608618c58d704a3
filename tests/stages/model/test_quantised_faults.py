"""Quantised folders that are unsupported or inconsistent are refused, and the message names key, tensor and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_folders import awq_config, compressed_config, gptq_config
from test_quantised_folders import UP, _folder
from tiny_checkpoints import save, tiny_model

from deepinfer.stages.model import CheckpointError, UnsupportedModelError, load_model, open_checkpoint

ACTIVATIONS = {"config_groups": {"group_0": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}}
UNSUPPORTED = {
    "an unknown method": ({"quant_method": "bitsandbytes"}, "quantisation 'bitsandbytes' is not supported"),
    "no method": ({"bits": 4}, "quantisation None is not supported"),
    "fp8": ({"quant_method": "fp8"}, "quantisation 'fp8' is not supported; supported: awq"),
    "awq of 8 bits": (awq_config(128, bits=8), "quantization_config.bits is 8, which is not supported; supported: 4"),
    "awq for gemv": (awq_config(128, version="gemv"), "version is 'gemv'.*supported: 'gemm'"),
    "awq for marlin": (awq_config(128, version="marlin"), "version is 'marlin'"),
    "gptq of 3 bits": (gptq_config(128, True, bits=3), "bits is 3"),
    "gptq of true bits": (gptq_config(128, True, bits=True), "bits is True"),
    "gptq for marlin": (gptq_config(128, True, checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    "gptq that was made for marlin": (gptq_config(128, True, is_marlin_format=True), "is_marlin_format is set"),
    "compressed-tensors of 3 bits": (compressed_config(128, True, num_bits=3), r"group_0\.weights\.num_bits is 3"),
    "compressed-tensors fp4": (compressed_config(128, True, type="float"), r"weights\.type is 'float'"),
    "compressed-tensors by tensor": (compressed_config(128, True, strategy="tensor"), "strategy is 'tensor'"),
    "marlin-24": ({**compressed_config(128, True), "format": "marlin-24"}, "format is 'marlin-24'"),
    "w8a8": ({**compressed_config(128, True), "format": "int-quantized"}, "format is 'int-quantized'"),
    "w4a8": ({**compressed_config(128, True), **ACTIVATIONS}, r"group_0\.input_activations is \{'num_bits': 8\}"),
    "no weights": ({**compressed_config(8, True), "config_groups": {"a": {}}}, "config_groups.a quantises no weights"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_an_unsupported_scheme_is_refused_by_its_key_before_weights_are_looked_at(what: str, tmp_path: Path) -> None:
    config, message = UNSUPPORTED[what]
    folder = save(tiny_model("llama"), tmp_path)
    _set_config(folder, config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        open_checkpoint(folder)
    assert "config.json" in str(caught.value)
    assert "awq with 4 bits" in str(caught.value)


SENSELESS: dict[str, tuple[Any, str]] = {
    "a list": ([1], r"quantization_config is \[1\], expected an object"),
    "a group of 0": (awq_config(0), "group_size is 0, expected a positive integer, or -1"),
    "a group of text": (gptq_config(128, True, group_size="128"), "group_size is '128'"),
    "no groups": ({**compressed_config(8, True), "config_groups": {}}, r"config_groups is \{\}"),
}


@pytest.mark.parametrize("what", SENSELESS)
def test_a_scheme_that_makes_no_sense_names_its_key(what: str, tmp_path: Path) -> None:
    config, message = SENSELESS[what]
    folder = save(tiny_model("llama"), tmp_path)
    _set_config(folder, config)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def _set_config(folder: Path, config: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))


def _ones(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


HALF = torch.float16
BROKEN = {
    "awq without scales": ("awq", {"scales": None}, r"up_proj\.scales is missing"),
    "awq without zeros": ("awq", {"qzeros": None}, r"up_proj\.qzeros is missing"),
    "awq with float codes": ("awq", {"qweight": _ones(256, 48, dtype=HALF)}, "qweight has dtype F16, expected I32"),
    "awq with other groups": ("awq", {"scales": _ones(8, 384, dtype=HALF)}, "8 groups for 256 columns.*group_size 128"),
    "awq of 8 bits under 4": ("awq", {"qweight": _ones(256, 96)}, r"scales has shape \[2, 384\], expected \[2, 768\]"),
    "awq with few zeros": ("awq", {"qzeros": _ones(2, 47)}, r"qzeros has shape \[2, 47\], expected \[2, 48\]"),
    "gptq of 8 bits under 4": ("gptq", {"qweight": _ones(64, 384)}, "2 groups for 512 columns"),
    "gptq with g_idx too high": ("gptq", {"g_idx": 2 * _ones(256)}, r"g_idx names group 2, expected 0 to 1"),
    "gptq with g_idx below 0": ("gptq", {"g_idx": -2 * _ones(256)}, r"g_idx names group -2"),
    "gptq with a short g_idx": ("gptq", {"g_idx": _ones(255)}, r"g_idx has shape \[255\], expected \[256\]"),
    "gptq with a bias": ("gptq", {"bias": _ones(384, dtype=HALF)}, "no such bias, and it is not 0"),
    "gptq with no extent": ("gptq", {"qweight": _ones(0, 384)}, r"qweight has shape \[0, 384\], expected 2 extents"),
    "a matrix that is there twice": (
        "gptq",
        {"weight": _ones(384, 256, dtype=HALF)},
        r"up_proj\.weight is there twice",
    ),
    "an unknown part": ("awq", {"g_idx": _ones(256)}, r"up_proj\.g_idx has dtype I32"),
    "packed without a shape": ("compressed-tensors", {"weight_shape": None}, r"weight_shape is missing"),
    "packed with another shape": (
        "compressed-tensors",
        {"weight_shape": torch.tensor([384, 264])},
        r"weight_shape says \[384, 264\], which does not fit",
    ),
    "asymmetric without zeros": (
        "compressed-tensors",
        {"weight_zero_point": None},
        "weight_zero_point is missing, yet",
    ),
    "packed with few zeros": ("compressed-tensors", {"weight_zero_point": _ones(47, 2)}, r"expected \[48, 2\]"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_parts_that_do_not_fit_one_another_are_named(what: str, tmp_path: Path) -> None:
    method, changes, message = BROKEN[what]
    folder = _folder(tmp_path, method, 128, dense=("layers.0", "self_attn"))
    for part, tensor in changes.items():
        if tensor is None:
            del folder.tensors[f"{UP}.{part}"]
        else:
            folder.tensors[f"{UP}.{part}"] = tensor
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        open_checkpoint(folder.write())
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_a_matrix_of_which_every_part_is_missing_is_named(method: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, method)
    folder.tensors = {name: tensor for name, tensor in folder.tensors.items() if not name.startswith(f"{UP}.")}
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        open_checkpoint(folder.write())


def test_a_quantised_matrix_of_a_wrong_size_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "awq", 128)
    for part in ("qweight", "qzeros", "scales"):
        other = folder.tensors[f"{UP.replace('up_proj', 'down_proj')}.{part}"]
        folder.tensors[f"{UP}.{part}"] = other.clone()
    with pytest.raises(CheckpointError, match=rf"{UP}.weight has shape \[256, 384\], expected \[384, 256\]"):
        open_checkpoint(folder.write())


def test_a_configuration_that_promises_a_method_that_no_tensor_has_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path)
    _set_config(folder, gptq_config(128, True))
    with pytest.raises(CheckpointError, match=r"no tensor ends in \.qweight, yet quantization_config says gptq"):
        open_checkpoint(folder)


def test_quantised_tensors_without_a_configuration_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "gptq", 128)
    folder.config = {}
    with pytest.raises(UnsupportedModelError, match="has dtype I32; supported: F32, F16, BF16"):
        open_checkpoint(folder.write())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_scale_that_is_not_finite_names_its_matrix(dtype: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, "awq", 128)
    folder.tensors[f"{UP}.scales"][1, 7] = float("nan")
    with pytest.raises(CheckpointError, match=rf"{UP}.weight holds NaN"):
        load_model(open_checkpoint(folder.write()), dtype=dtype)
