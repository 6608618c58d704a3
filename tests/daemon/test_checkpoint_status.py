"""What a loader found in the files of a model, as an operator sees it; KV scales among it, which are not used."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_llama

from deepinfer.daemon import start_times
from deepinfer.daemon.display import summary_rows
from deepinfer.daemon.engine import Engine
from deepinfer.daemon.start_times import StartTimes, in_words
from deepinfer.stages.model import CheckpointError, open_checkpoint

SPELLINGS = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale")


def _with_scales(folder: Path, spelling: str, **values: object) -> Path:
    path = save_tiny_llama(folder) / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        for side, value in values.items():
            name = f"model.layers.{layer}.self_attn.{spelling.format(side, side)}"
            tensors[name] = torch.tensor(value, dtype=torch.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_kv_scales_of_every_spelling_are_counted_and_said_not_to_be_used(
    spelling: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(_with_scales(tmp_path, spelling, k=0.5, v=[0.25, 2.0]))
    assert not any("scale" in name for name in checkpoint.source.headers)
    scales = checkpoint.describe()["kv_scales"]
    assert scales == {"count": 4, "k": [0.5, 0.5], "v": [0.25, 2.0], "used": False}
    assert "4 KV scales are not used" in caplog.text


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), []])
def test_a_kv_scale_that_is_no_positive_number_is_named(value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: KV scale model\.layers\.0\.self_attn\.k_scale"):
        open_checkpoint(_with_scales(tmp_path, "{}_scale", k=value))


@pytest.mark.parametrize("spelling", ["{}_proj.q_scale", "{}_scales", "mlp.{}_scale", "{}_proj.weight_scale"])
def test_other_scales_are_stray_tensors(spelling: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="stray tensor"):
        open_checkpoint(_with_scales(tmp_path, spelling, k=1.0))


def test_status_shows_what_was_found_and_the_answers_are_those_without_kv_scales(tmp_path: Path) -> None:
    answers = []
    for folder, values in (("plain", {}), ("scaled", {"k": 0.5, "v": 0.5})):
        (tmp_path / folder).mkdir()
        with Engine(_with_scales(tmp_path / folder, "{}_scale", **values), num_blocks=16) as engine:
            answers.append(engine.complete("The quick", max_new_tokens=6, ignore_eos=True).ids)
            status = engine.status()
    assert answers[0] == answers[1]
    found = status["engine"]["checkpoint"]
    assert (found["format"], found["tensor_types"]) == ("safetensors", {"F32": 21})
    assert found["kv_scales"]["count"] == 4
    shown = dict(summary_rows({**status, "endpoint": "ipc://somewhere"}))
    assert shown["weights"].startswith("safetensors: 21 x F32; kv scales (count 4, ")
    assert shown["weights"].endswith("used False)")


def test_status_shows_how_long_the_parts_of_the_load_took_and_how_fast_weights_were_read(tmp_path: Path) -> None:
    with Engine(_with_scales(tmp_path, "{}_scale"), num_blocks=16) as engine:
        status = engine.status()
    load = status["engine"]["load"]
    assert list(load["seconds"]) == ["weights", "pool"]
    assert load["weights_mb_per_s"] > 0
    shown = dict(summary_rows({**status, "endpoint": "ipc://somewhere"}))
    assert re.fullmatch(r"weights [\d.]+ s, pool [\d.]+ s; weights at [\d,]+ MB/s", shown["load"])


def test_the_rate_of_a_load_is_that_of_the_files_tensors_over_the_seconds_of_weights_alone(monkeypatch) -> None:
    times, clock = StartTimes(), iter([10.0, 12.5, 20.0, 20.25])
    monkeypatch.setattr(start_times, "monotonic", lambda: next(clock))
    for part in ("imports", "weights"):
        with times.part(part):
            pass
    load = times.describe(50_000_000)
    assert load == {"seconds": {"imports": 2.5, "weights": 0.25}, "weights_mb_per_s": 200.0}
    assert in_words(load) == "imports 2.50 s, weights 0.25 s; weights at 200 MB/s"
