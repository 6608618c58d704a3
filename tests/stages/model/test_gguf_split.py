"""A GGUF model that is split over several files is one model; parts that are missing or foreign are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_files import GGUFModelFile
from tiny_checkpoints import tiny_model

from deepinfer.stages.model import CheckpointError, load_model, open_checkpoint, resolve_model


def _split(folder: Path, part_tensors: int = 13, seed: int = 0, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    model = tiny_model("llama", seed=seed, **changes)
    return GGUFModelFile(folder / "m.gguf", model, "llama", "Q8_0", part_tensors).write()


def test_a_split_model_holds_what_the_single_file_holds(tmp_path: Path) -> None:
    first = _split(tmp_path / "parts")
    assert first.name == "m-00001-of-00003.gguf"
    whole = open_checkpoint(GGUFModelFile(tmp_path / "m.gguf", tiny_model("llama"), "llama", "Q8_0").write())
    parts = open_checkpoint(first)
    assert parts.config == whole.config
    assert parts.source.headers.keys() == whole.source.headers.keys()
    for name in whole.source.headers:
        assert torch.equal(parts.source.read(name), whole.source.read(name)), name
    assert load_model(parts).describe()["checkpoint"]["parts"] == 3


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first = _split(tmp_path)
    for number in (2, 3):
        (tmp_path / f"m-0000{number}-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"missing: m-00002-of-00003\.gguf, m-00003-of-00003\.gguf"):
        open_checkpoint(first)


def test_another_part_than_the_first_names_the_first(tmp_path: Path) -> None:
    first = _split(tmp_path)
    with pytest.raises(CheckpointError, match=rf"not the first of 3 parts; give {first}"):
        open_checkpoint(tmp_path / "m-00002-of-00003.gguf")


def test_a_part_under_another_name_says_what_names_must_be(tmp_path: Path) -> None:
    renamed = _split(tmp_path).rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 parts, whose names must end in -00001-of-00003\.gguf"):
        open_checkpoint(renamed)


def test_parts_of_different_splits_are_refused(tmp_path: Path) -> None:
    first = _split(tmp_path)
    second, third = (tmp_path / f"m-0000{number}-of-00003.gguf" for number in (2, 3))
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"m-00002-of-00003\.gguf: split\.no and split\.count are 2 and 3, expected 1"
    ):
        open_checkpoint(first)
    other = _split(tmp_path / "other", part_tensors=14)
    second.write_bytes(other.with_name(second.name).read_bytes())
    with pytest.raises(CheckpointError, match=r"is in m-0000.-of-00003\.gguf too|the 3 parts hold"):
        open_checkpoint(first)
    second.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: .*cut"):
        open_checkpoint(first)


def test_a_link_to_a_part_finds_the_other_parts_beside_the_link(tmp_path: Path) -> None:
    first = _split(tmp_path / "parts")
    links = tmp_path / "links"
    links.mkdir()
    for number, part in enumerate(sorted(first.parent.glob("*.gguf"))):
        moved = part.rename(tmp_path / f"blob{number}")
        (links / part.name).symlink_to(moved)
    assert open_checkpoint(resolve_model(links / first.name)).format == "gguf"
