"""GGUF files that are unsupported, inconsistent, damaged or hostile are refused by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import GGUFModelFile
from test_gguf import WIDE
from tiny_checkpoints import tiny_model

from deepinfer.stages.model import (
    CheckpointError,
    ModelError,
    UnsupportedModelError,
    load_model,
    open_checkpoint,
)
from deepinfer.stages.model.gguf_header import read_header


def _llama_file(path: Path) -> GGUFModelFile:
    return GGUFModelFile(path / "m.gguf", tiny_model("llama", **WIDE), "llama")


def test_an_unsupported_type_is_refused_with_tensor_and_type(tmp_path: Path) -> None:
    file = _llama_file(tmp_path)
    file.tensors["blk.1.ffn_up.weight"] = (
        gguf.quantize(np.ones((512, 256), np.float32), gguf.GGMLQuantizationType.TQ2_0),
        "TQ2_0",
    )
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_up\.weight has type TQ2_0; supported: F32, F16"):
        open_checkpoint(file.write())


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("llama"), "stablelm").write()
    with pytest.raises(UnsupportedModelError, match=r"architecture 'stablelm' is not supported; supported: .*llama"):
        open_checkpoint(file)


def test_an_unsupported_rope_scaling_is_refused_by_name(tmp_path: Path) -> None:
    file = _llama_file(tmp_path)
    file.writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.type 'longrope' is not supported"):
        open_checkpoint(file.write())


def test_experts_are_refused(tmp_path: Path) -> None:
    file = _llama_file(tmp_path)
    file.writer.add_expert_count(8)
    with pytest.raises(UnsupportedModelError, match="mixture of 8 experts"):
        open_checkpoint(file.write())


def test_stray_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    faults = {
        r"stray tensor blk\.0\.attn_sinks\.weight": (
            "blk.0.attn_sinks.weight",
            (np.zeros(4, np.float32), "F32"),
        ),
        r"stray tensor model\.layers\.9\.mlp": (
            "blk.9.ffn_up.weight",
            (np.zeros((512, 256), np.float32), "F32"),
        ),
        r"norm\.weight has shape \[255\]": ("output_norm.weight", (np.zeros(255, np.float32), "F32")),
        r"input_layernorm\.weight is missing": ("blk.1.attn_norm.weight", None),
    }
    for number, (message, (name, content)) in enumerate(faults.items()):
        (tmp_path / str(number)).mkdir()
        file = _llama_file(tmp_path / str(number))
        if content is None:
            del file.tensors[name]
        else:
            file.tensors[name] = content
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(file.write())


@pytest.mark.parametrize("type_name", ["F32", "Q4_1", "Q5_1", "Q8_0"])
def test_a_non_finite_value_names_its_tensor(type_name: str, tmp_path: Path) -> None:
    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("llama", **WIDE), "llama", type_name)
    data = file.tensors["blk.1.ffn_up.weight"][0]
    data.view(np.uint8).reshape(512, -1)[5, :4] = 0xFF
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        load_model(open_checkpoint(file.write()))


def test_a_file_cut_anywhere_is_refused_and_never_crashes(tmp_path: Path) -> None:
    whole = _llama_file(tmp_path).write().read_bytes()
    cut = tmp_path / "cut.gguf"
    header = read_header(tmp_path / "m.gguf").nbytes
    for size in [5, 9, 24, *range(30, header, 97), header + 1, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(cut)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"GGML" + bytes(40), b"PK\x03\x04"):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match="is no GGUF file"):
            open_checkpoint(tmp_path / "x.gguf")


def test_hostile_lengths_in_the_header_are_refused(tmp_path: Path) -> None:
    start = b"GGUF" + (3).to_bytes(4, "little")
    huge = (2**62).to_bytes(8, "little")
    for content in (start + huge + huge, start + bytes(8) + (1).to_bytes(8, "little") + huge):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match="cut or damaged"):
            open_checkpoint(tmp_path / "x.gguf")


def test_random_damage_to_the_header_gives_an_error_of_ours_or_a_sound_model(tmp_path: Path) -> None:
    whole = bytearray(_llama_file(tmp_path).write().read_bytes())
    size = read_header(tmp_path / "m.gguf").nbytes
    random = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for at in random.integers(0, size, random.integers(1, 4)):
            content[at] = random.integers(0, 256)
        damaged.write_bytes(content)
        try:
            open_checkpoint(damaged)
        except ModelError:
            refused += 1
    assert refused > 100
