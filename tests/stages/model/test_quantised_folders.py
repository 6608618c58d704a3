"""AWQ, GPTQ and compressed-tensors folders: codes, scales and zero points, exactly as their formats define them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from executor_runner import Runner
from quantised_folders import (
    LINEARS,
    QuantisedFolder,
    act_order,
    awq_config,
    awq_parts,
    compressed_config,
    gptq_config,
    gptq_parts,
    pack_quantized_parts,
    quantise,
    shuffled,
)
from reference import teacher_forced_logits
from tiny_checkpoints import random_ids, tiny_model

from deepinfer.kernels import packed_linear
from deepinfer.kernels.cpu.records import P_INT4
from deepinfer.kernels.devices import open_device
from deepinfer.kernels.stored_words import StoredWords
from deepinfer.stages.model import Checkpoint, UnsupportedModelError, load_model, open_checkpoint
from deepinfer.stages.model.quantisation import scheme_from_json
from deepinfer.stages.model.quantised_source import QuantisedSource

WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
UP = "model.layers.1.mlp.up_proj"


def _folder(path: Path, method: str, group: int = 128, symmetric: bool = False, **options: Any) -> QuantisedFolder:
    """`options`: dtype of the scales, version of gptq, group_of, dense, linears, family, fields of config.json."""
    version = options.pop("version", 1)
    how = {key: options.pop(key) for key in ("dtype", "group_of") if key in options}
    which = {key: options.pop(key) for key in ("dense", "linears") if key in options}
    model = tiny_model(options.pop("family", "llama"), **options.pop("sizes", WIDE))
    quantised = partial(quantise, group=group, symmetric=symmetric, **how)
    parts: dict[str, Callable] = {
        "awq": awq_parts,
        "gptq": partial(gptq_parts, version=version),
        "compressed-tensors": partial(pack_quantized_parts, symmetric=symmetric),
    }
    config = {
        "awq": partial(awq_config, group),
        "gptq": partial(gptq_config, group, symmetric),
        "compressed-tensors": partial(compressed_config, group, symmetric),
    }[method](**options)
    return QuantisedFolder(model, path, quantised, parts[method], config, **which)


CASES = {
    "awq, 128": ("awq", 128, False, {}),
    "awq, 64": ("awq", 64, False, {}),
    "awq, 32": ("awq", 32, False, {}),
    "awq, whole rows": ("awq", -1, False, {}),
    "gptq v1": ("gptq", 128, False, {}),
    "gptq v1, symmetric": ("gptq", 128, True, {}),
    "gptq v2": ("gptq", 64, False, {"version": 2, "checkpoint_format": "gptq_v2"}),
    "gptq v2, symmetric": ("gptq", 32, True, {"version": 2, "checkpoint_format": "gptq_v2"}),
    "gptq, whole rows": ("gptq", -1, True, {}),
    "compressed-tensors, 128": ("compressed-tensors", 128, False, {}),
    "compressed-tensors, 32, symmetric, bf16 scales": ("compressed-tensors", 32, True, {"dtype": torch.bfloat16}),
    "compressed-tensors, channels": ("compressed-tensors", -1, False, {}),
    "compressed-tensors, channels, symmetric": ("compressed-tensors", -1, True, {}),
}


def _check_weights(checkpoint: Checkpoint, folder: QuantisedFolder, in_codes: bool = True) -> None:
    """Both forms of every matrix are the definition, to the bit."""
    for name, expected in folder.weights.items():
        assert torch.equal(checkpoint.source.read(name), expected), name
        groups = checkpoint.source.read_int4(name)
        assert (groups is not None) == in_codes
        if groups is not None:
            assert torch.equal(torch.from_numpy(groups.dense()), expected), name
            assert groups.order is not None or checkpoint.source.words(name) is not None
        _check_words(checkpoint.source.words(name), expected)


def _check_words(words: StoredWords | None, expected: torch.Tensor) -> None:
    """They are packed to the definition, to the bit."""
    if words is not None:
        rows = packed_linear.PackedLinear(P_INT4, words).rows(torch.arange(len(expected), dtype=torch.int32))
        assert torch.equal(rows, expected if words.order is None else expected[:, torch.from_numpy(words.order)])


@pytest.mark.parametrize("case", CASES)
def test_weights_of_every_scheme_are_exactly_what_the_format_defines(case: str, tmp_path: Path) -> None:
    method, group, symmetric, options = CASES[case]
    folder = _folder(tmp_path, method, group, symmetric, **options)
    checkpoint = open_checkpoint(folder.write())
    _check_weights(checkpoint, folder)
    report = checkpoint.source.report()["quantisation"]
    assert isinstance(report, dict)
    assert (report["method"], report["with_codes"], report["dequantised"]) == (method, 14, 0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_matrix_that_compressed_tensors_packed_means_what_it_unpacks_to(
    dtype: torch.dtype, group: int, symmetric: bool, tmp_path: Path
) -> None:
    folder = _folder(tmp_path, "compressed-tensors", group, symmetric, dense=("layers.0", "self_attn", "gate", "down"))
    weights = folder.config["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    q = quantise(folder.weights[f"{UP}.weight"].roll(3), group, symmetric, dtype)
    state = {"weight": q.weight().to(dtype), "weight_scale": q.scales}
    if not symmetric:
        state["weight_zero_point"] = (q.zeros - 8).to(torch.int8)
    packed = PackedQuantizationCompressor.compress(state, scheme)
    expected = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    folder.tensors |= {f"{UP}.{part}": tensor for part, tensor in packed.items()}
    source = open_checkpoint(folder.write()).source
    assert torch.equal(source.read(f"{UP}.weight").to(dtype), expected)
    assert expected.dtype == dtype
    groups = source.read_int4(f"{UP}.weight")
    assert groups is not None
    assert (torch.from_numpy(groups.dense()).to(dtype) - expected).abs().max() <= 1e-6 * (dtype == torch.float32)


def test_zero_points_of_older_compressed_tensors_files_are_signed_bytes(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "compressed-tensors", 64, symmetric=False)
    name = f"{UP}.weight_zero_point"
    packed = folder.tensors[name].numpy().astype("<u4")
    nibbles = torch.from_numpy((packed[:, None] >> (4 * torch.arange(8).numpy()[:, None])) & 15).reshape(384, -1)
    folder.tensors[name] = (nibbles.long() - 8).to(torch.int8)
    _check_weights(open_checkpoint(folder.write()), folder)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("version", "label"), [(1, "gptq_v2"), (2, "gptq")])
def test_zero_points_of_a_gptq_file_are_read_by_its_data_when_its_label_lies(
    version: int, label: str, symmetric: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _folder(tmp_path, "gptq", 128, symmetric, version=version, checkpoint_format=label)
    checkpoint = open_checkpoint(folder.write())
    _check_weights(checkpoint, folder)
    report = checkpoint.source.report()["quantisation"]
    assert isinstance(report, dict)
    assert (report["zero_points"], report["labelled"]) == (f"v{version}", label)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert f"read as v{version}" in record.message
    assert f"checkpoint_format {label}" in record.message


def test_a_gptq_file_whose_data_decide_nothing_is_read_as_labelled(tmp_path: Path) -> None:
    for version, label in ((1, "gptq"), (2, "gptq_v2")):
        folder = _folder(tmp_path / label, "gptq", 128, version=version, checkpoint_format=label)
        for name, tensor in folder.tensors.items():
            if name.endswith("qweight"):  # Codes of 15 throughout lie far above every zero point.
                folder.weights[name.removesuffix(".qweight") + ".weight"][:] = 0
                folder.tensors[name] = torch.full_like(tensor, -1)
        source = open_checkpoint(folder.write()).source
        report = source.report()["quantisation"]
        assert isinstance(report, dict)
        assert report["zero_points"] == f"v{version}"


def test_zero_points_of_0_in_a_v1_file_borrow_and_are_found_again(tmp_path: Path) -> None:
    def zero_first(weight: torch.Tensor):
        q = quantise(weight, 128)
        q.zeros[::3] = 0
        q.zeros[1::3, 0] = 15
        return q

    model = tiny_model("llama", **WIDE)
    folder = QuantisedFolder(model, tmp_path, zero_first, gptq_parts, gptq_config(128, False))
    _check_weights(open_checkpoint(folder.write()), folder)


def test_act_order_matrices_keep_their_codes_with_their_columns_sorted_by_group(tmp_path: Path) -> None:
    folder = act_order(tiny_model("llama", **WIDE), tmp_path)
    checkpoint = open_checkpoint(folder.write())
    _check_weights(checkpoint, folder)
    ids = random_ids(40)
    expected = _reference_logits(folder, ids)
    packed = load_model(checkpoint)
    kinds = packed.describe()["linears"]
    assert all(kind.startswith("w4a16") and kind.endswith("act-order") for kind in kinds), kinds
    assert packed.describe()["checkpoint"]["quantisation"]["dequantised"] == 0
    got = Runner(packed).feed({0: ids}, all_rows=True)
    assert 0 < (got - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


def test_matrices_that_are_multiplied_as_one_are_dequantised_if_their_orders_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", **WIDE)
    folder = act_order(model, tmp_path)
    dense = model.get_parameter(f"{UP}.weight").detach()
    other = shuffled(dense.half().float(), seed=2)
    folder.tensors |= gptq_parts(UP, other)
    folder.weights[f"{UP}.weight"] = other.weight()
    checkpoint = open_checkpoint(folder.write())
    _check_weights(checkpoint, folder)
    for part in ("gate", "up"):
        assert f"layers.1.mlp.{part}_proj.weight is dequantised, to 16 bits a weight in bf16" in caplog.text
    loaded = load_model(checkpoint, dtype="bf16").describe()
    kinds = loaded["linears"]
    assert isinstance(kinds, dict)
    assert {kind.split()[0]: count for kind, count in kinds.items()} == {"w4a16": 7, "dense": 1}
    assert loaded["checkpoint"]["quantisation"]["dequantised"] == 2


@pytest.mark.parametrize("device", ["cpu", "host-emulation"])
@pytest.mark.parametrize("method", ["awq", "compressed-tensors"])
def test_a_head_of_four_bits_keeps_its_codes_and_gives_fp32_logits(method: str, device: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, method, 64, linears=("lm_head", *LINEARS))
    checkpoint = open_checkpoint(folder.write())
    model = load_model(checkpoint, batch_invariant=True, ops=open_device(device))
    assert model.head.kind.startswith("w4a16")
    weight = folder.weights["lm_head.weight"]
    hidden = torch.randn(70, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = model.head(hidden)
    assert logits.dtype == torch.float32
    assert (logits - hidden.float() @ weight.T).abs().max() < 1e-4
    norms = sum(4 * header.shape[0] for header in checkpoint.source.headers.values() if len(header.shape) == 1)
    estimate = checkpoint.estimate_weight_bytes("bf16", cuda_kernels=device != "cpu")
    assert estimate == pytest.approx(model.weight_bytes + norms, rel=0.03)


def test_act_order_with_neighbouring_groups_keeps_its_codes(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "gptq", 128, desc_act=True)
    _check_weights(open_checkpoint(folder.write()), folder)


GOLDEN = Path(__file__).parent / "golden"
WRITTEN = json.loads((GOLDEN / "quantised.json").read_text())["variants"]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_gptqmodel_wrote_is_what_gptqmodel_reads(name: str, tmp_path: Path) -> None:
    """Its own dequantised weights, rounded to fp16 as it has them; `make_golden.py` wrote the files."""
    shutil.copyfile(GOLDEN / f"{name}.safetensors", tmp_path / "model.safetensors")
    scheme = scheme_from_json({"quantization_config": WRITTEN[name]["config"]}, name)
    assert scheme is not None
    source = QuantisedSource(tmp_path, scheme, WRITTEN[name]["sha256"])
    for matrix, wanted in WRITTEN[name]["sha256"].items():
        weight = source.read(matrix)
        assert hashlib.sha256(weight.half().numpy().tobytes()).hexdigest() == wanted, matrix
        groups = source.read_int4(matrix)
        assert groups is not None
        assert torch.equal(torch.from_numpy(groups.dense()), weight)
        assert (groups.order is not None) == ("act-order" in name)


def test_a_group_size_beyond_the_row_is_the_whole_row(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "awq", -1)
    folder.config["group_size"] = 10**30
    _check_weights(open_checkpoint(folder.write()), folder)


def test_groups_that_the_kernels_do_not_have_are_split_or_dequantised(tmp_path: Path) -> None:
    sizes = {**WIDE, "hidden_size": 320, "intermediate_size": 336, "num_attention_heads": 5, "num_key_value_heads": 1}
    for group, split in ((256, 64), (96, 32), (-1, 64), (48, 0)):
        folder = _folder(tmp_path / str(group), "awq", group, sizes=sizes)
        source = open_checkpoint(folder.write()).source
        for name, expected in folder.weights.items():
            columns_fit = expected.shape[1] == 320
            assert source.headers[name].group == (split if columns_fit else 0), name
            assert torch.equal(source.read(name), expected)
            groups = source.read_int4(name)
            assert groups is None or torch.equal(torch.from_numpy(groups.dense()), expected)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_modules_that_are_not_quantised_load_as_they_are_and_the_estimate_counts_them(
    method: str, tmp_path: Path
) -> None:
    folder = _folder(tmp_path, method, 64, dense=("layers.0.mlp.down_proj", "layers.1.self_attn.v_proj"))
    checkpoint = open_checkpoint(folder.write())
    model = load_model(checkpoint, w4_prefill="int4")
    kinds = model.describe()["linears"]
    assert {kind.split()[0]: count for kind, count in kinds.items()} == {"w4a16": 6, "dense": 2}
    norms = sum(4 * header.shape[0] for header in checkpoint.source.headers.values() if len(header.shape) == 1)
    assert checkpoint.weight_bytes_estimate == pytest.approx(model.weight_bytes + norms, rel=0.02)


def _reference_logits(folder: QuantisedFolder, ids: list[int], family: str = "llama") -> torch.Tensor:
    """Of transformers, with the weights that the folder means."""
    model = tiny_model(family, **WIDE)
    state = {name: tensor.float() for name, tensor in folder.tensors.items() if tensor.is_floating_point()}
    known = {name for name, _ in model.named_parameters()}
    missing, _ = model.load_state_dict(
        {name: tensor for name, tensor in {**state, **folder.weights}.items() if name in known}, strict=False
    )
    assert not missing
    return teacher_forced_logits(model, ids)


@pytest.mark.parametrize(
    ("method", "family"), [("awq", "llama"), ("gptq", "qwen2"), ("gptq", "qwen3"), ("compressed-tensors", "llama")]
)
def test_logits_agree_with_transformers_on_the_dequantised_weights_to_the_compute_dtype(
    method: str, family: str, tmp_path: Path
) -> None:
    folder = _folder(tmp_path, method, 128, family=family)
    ids = random_ids(40)
    expected = _reference_logits(folder, ids, family)
    path = folder.write()
    exact = Runner(load_model(open_checkpoint(path), dtype="fp32")).feed({0: ids}, all_rows=True)
    assert expected.abs().max() > 0.5
    assert (exact - expected).abs().max() <= 1e-4
    packed = load_model(open_checkpoint(path))
    assert packed.compute_dtype == "bf16"
    assert all("w4a16" in linear.kind for layer in packed.layers for linear in layer.linears)
    got = Runner(packed).feed({0: ids}, all_rows=True)
    assert 0 < (got - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


def test_a_bias_of_zeros_that_the_model_has_not_is_dropped(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "gptq", 128)
    folder.tensors[f"{UP}.bias"] = torch.zeros(384, dtype=torch.float16)
    assert f"{UP}.bias" not in open_checkpoint(folder.write()).source.headers


@pytest.mark.parametrize(
    ("method", "file", "config"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False, "sym": False}),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_a_configuration_beside_config_json_is_read_as_older_tools_wrote_it(
    method: str, file: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = _folder(tmp_path, method, 64)
    folder.config = {}
    path = folder.write()
    with pytest.raises(UnsupportedModelError, match="has dtype I32"):
        open_checkpoint(path)
    (path / file).write_text(json.dumps(config))
    _check_weights(open_checkpoint(path), folder)
    (path / file).write_text(json.dumps({**config, "bits": 3, "w_bit": 3}))
    with pytest.raises(UnsupportedModelError, match=rf"{file}\.bits is 3"):
        open_checkpoint(path)
