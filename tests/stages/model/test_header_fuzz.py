"""Headers of hostile or damaged files: an error of ours or a sound model, and no memory beyond what the files hold."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz
from gguf_files import GGUFModelFile
from hypothesis import given
from hypothesis import strategies as st
from test_gguf import WIDE
from tiny_checkpoints import save, tiny_model

from deepinfer.stages.model import CheckpointError, ModelError, open_checkpoint
from deepinfer.stages.model.gguf_header import read_header

FUZZ = fuzz(60, repeatable=True)
BASE, FACTOR = 2 * 2**20, 100
"""Memory that opening may take: a fixed amount, and this many bytes of objects for each byte of the files."""


def _refused(path: Path, size: int) -> bool:
    """Opens `path`, of `size` bytes of header. Any error that is not ours goes up."""
    tracemalloc.start()
    try:
        open_checkpoint(path).source.close()
        refused = False
    except ModelError:
        refused = True
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < BASE + FACTOR * size, peak
    return refused


# Values that a JSON field may turn out to hold, huge and deep ones among them.
numbers = st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, float("inf"), float("nan")])
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("sharded"), shard="60KB")


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return GGUFModelFile(path, tiny_model("llama", **WIDE), "llama").write().read_bytes()


FIELDS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "rope_scaling",
    "rope_theta", "eos_token_id", "tie_word_embeddings", "quantization_config", "attention_bias",
    "original_max_position_embeddings",
)  # fmt: skip
ROPE = ("rope_type", "factor", "rope_theta", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "truncate")
ropes = st.builds(
    lambda rope_type, changes: {"rope_type": rope_type, "factor": 2.0, **changes},
    st.sampled_from(["yarn", "llama3", "linear"]),
    st.dictionaries(st.sampled_from(ROPE[1:]), values, min_size=1, max_size=2),
)
QUANTISATION = (
    "bits",
    "group_size",
    "version",
    "checkpoint_format",
    "sym",
    "config_groups",
    "format",
    "is_marlin_format",
)
quantisations = st.fixed_dictionaries(
    {"quant_method": st.sampled_from(["awq", "gptq", "compressed-tensors"])},
    optional={name: values | st.just(4) for name in QUANTISATION},
)


@FUZZ
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3)
    | st.fixed_dictionaries({"rope_parameters": ropes})
    | st.fixed_dictionaries({"quantization_config": quantisations})
)
def test_any_value_in_config_json_is_taken_or_refused(folder: Path, changes: dict[str, Any]) -> None:
    _with_json(folder / "config.json", lambda raw: {**raw, **changes}, folder)


@FUZZ
@given(data=st.data())
def test_any_value_in_the_index_is_taken_or_refused(sharded: Path, data: st.DataObject) -> None:
    def change(raw: dict[str, Any]) -> Any:
        kind = data.draw(st.sampled_from(["all", "map", "entry", "name"]))
        if kind == "all":
            return data.draw(values)
        if kind == "map":
            return {**raw, "weight_map": data.draw(values)}
        name = data.draw(st.sampled_from(sorted(raw["weight_map"])))
        if kind == "entry":
            return {**raw, "weight_map": {**raw["weight_map"], name: data.draw(values)}}
        return {**raw, "weight_map": {**raw["weight_map"], data.draw(st.text(max_size=8)): raw["weight_map"][name]}}

    _with_json(sharded / "model.safetensors.index.json", change, sharded)


def _with_json(path: Path, change: Callable[[dict[str, Any]], Any], model: Path) -> bool:
    before = path.read_text()
    try:
        path.write_text(json.dumps(change(json.loads(before))))
        return _refused(model, len(path.read_bytes()))
    finally:
        path.write_text(before)


def test_json_that_is_deep_or_has_endless_numbers_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    before = path.read_text()
    try:
        for content in (
            "[" * 100_000,
            '{"a":' * 50_000,
            '{"vocab_size": ' + "9" * 5000 + "}",
            "\x00",
        ):
            path.write_text(content)
            with pytest.raises(CheckpointError, match=r"config\.json"):
                open_checkpoint(folder)
    finally:
        path.write_text(before)


@FUZZ
@given(data=st.data())
def test_damage_to_a_safetensors_header_is_refused_or_harmless(folder: Path, data: st.DataObject) -> None:
    path = folder / "model.safetensors"
    before = path.read_bytes()
    size = 8 + int.from_bytes(before[:8], "little")
    try:
        content = data.draw(_damaged(before, size) | _header(before, size))
        path.write_bytes(content)
        _refused(folder, size)
    finally:
        path.write_bytes(before)


@st.composite
def _damaged(draw: st.DrawFn, whole: bytes, size: int) -> bytes:
    """Some bytes of the first `size` differ, or the file ends early."""
    content = bytearray(whole)
    for at in draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)):
        content[at] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.sampled_from([len(whole), size, size - 1, size // 2, 9, 8, 3, 0]))])


@st.composite
def _header(draw: st.DrawFn, whole: bytes, size: int) -> bytes:
    """One field of one tensor of a sound header replaced, and the length still right."""
    header = json.loads(whole[8:size])
    name = draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
    field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    header[name][field] = draw(
        values
        | st.sampled_from(["F64", "I64", "F8_E4M3", "F4", "BOOL", "U16", "C64"])
        | st.lists(st.sampled_from([0, 1, 4, 64, 2**32, 2**63, 2**64 - 1]), max_size=3)
    )
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + whole[size:]


@FUZZ
@given(data=st.data())
def test_damage_to_a_gguf_header_is_refused_or_harmless(
    tmp_path_factory: Any, gguf_bytes: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(gguf_bytes)
    size = read_header(path).nbytes
    path.write_bytes(data.draw(_damaged(gguf_bytes, size)))
    _refused(path, size)


lengths = st.sampled_from([0, 1, 2, 255, 4096, 2**16, 2**31, 2**32, 2**62, 2**63, 2**64 - 1])


@FUZZ
@given(data=st.data())
def test_a_gguf_header_of_any_lengths_and_types_is_refused_or_harmless(
    tmp_path_factory: Any, data: st.DataObject
) -> None:
    parts = [b"GGUF", struct.pack("<IQQ", 3, data.draw(lengths), data.draw(lengths))]
    for _ in range(data.draw(st.integers(0, 4))):
        key = data.draw(st.sampled_from([b"general.architecture", b"llama.block_count", b"split.count", b"x"]))
        kind, inner = data.draw(st.integers(0, 13)), data.draw(st.integers(0, 13))
        parts.append(struct.pack("<Q", len(key)) + key + struct.pack("<I", kind))
        parts.append(struct.pack("<I", inner) if kind == 9 else b"")
        parts.append(struct.pack("<Q", data.draw(lengths)) + data.draw(st.binary(max_size=64)))
    content = b"".join(parts)
    path = tmp_path_factory.mktemp("hostile") / "m.gguf"
    path.write_bytes(content)
    _refused(path, len(content))


def test_an_array_as_long_as_its_file_takes_no_more_memory_than_the_file(tmp_path: Path) -> None:
    path, count = tmp_path / "m.gguf", 2**24
    key = b"tokenizer.ggml.token_type"
    head = struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, 0, count)
    path.write_bytes(b"GGUF" + head + bytes(count))
    tracemalloc.start()
    assert len(read_header(path).metadata[key.decode()]) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * count


def test_rope_frequencies_of_another_number_than_the_head_has_are_refused(tmp_path: Path) -> None:
    import numpy as np

    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("llama", **WIDE), "llama")
    file.tensors["rope_freqs.weight"] = (np.ones(31, np.float32), "F32")
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has 31 values, expected 32"):
        open_checkpoint(file.write())
