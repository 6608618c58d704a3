"""The bench of loading runs on files of its own and on given ones. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from deepinfer.daemon.bench import loading
from deepinfer.daemon.bench.loading import run_loading_bench
from deepinfer.daemon.bench.loading_files import (
    LAYER_OF_3B,
    SMOLLM2,
    TYPES,
    Shape,
    fitting,
    random_matrix,
    write_random_model,
)
from deepinfer.daemon.cli import main
from deepinfer.stages.model import load_model, open_checkpoint

TINY = Shape("tiny", 256, 512, 2, 4, 2, 64, 160)


def test_every_type_is_reported_beside_a_read_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "_SHAPES", (TINY,))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = run_loading_bench([], 2, 1, tmp_path / "result.json")
    assert [row["file"] for row in report["rows"]] == [f"tiny, {name}" for name in TYPES]
    assert list(tmp_path.iterdir()) == [tmp_path / "result.json"]
    stored = json.loads((tmp_path / "result.json").read_text())
    assert {"command", "machine", "versions", "definitions"} <= stored.keys()
    for row in stored["rows"]:
        assert row["times_a_read"]["min"] > 0
        assert row["load_s"]["median"] > 0
        assert row["weight_bytes"] > 0


def test_given_models_are_measured_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    write_random_model(path, TINY, "Q4_1")
    done = CliRunner().invoke(main, ["bench", "loading", "--model", str(path), "--rounds", "1", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.output.splitlines()] == ["file", "some.gguf"]


@pytest.mark.parametrize("type_name", TYPES)
def test_random_matrices_are_finite_blocks_of_their_type_and_load(type_name: str, tmp_path: Path) -> None:
    raw = random_matrix(np.random.default_rng(0), type_name, 3, 512)
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    assert values.shape == (3, 512)
    assert np.isfinite(values).all()
    assert np.unique(values).size > 100
    write_random_model(tmp_path / "m.gguf", TINY, type_name)
    assert load_model(open_checkpoint(tmp_path / "m.gguf")).config.num_layers == 2


def test_rows_of_every_shape_are_whole_blocks() -> None:
    for shape in (SMOLLM2, LAYER_OF_3B):
        for type_name in TYPES:
            weights = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0]
            found = fitting(shape, type_name)
            assert found.hidden % weights == found.inner % weights == found.heads * found.head_dim % weights == 0
            assert (found == shape) == (shape.hidden % weights == 0)
