"""The bytes that the pool must hold, as test data (`make_golden.py`), against every encoder that runs here."""

from __future__ import annotations

import json
from pathlib import Path

import make_golden
import numpy as np
import pytest
import torch
from kernel_harness import write_values

from deepinfer.kernels import CODECS, resolve_kv_format
from deepinfer.kernels.reference_codecs import sanitize

GOLDEN = Path(__file__).parent / "golden"
NAMES = [codec.name for codec in CODECS]


class Golden:
    """One file: inputs, and what must become of them."""

    def __init__(self, name):
        data = json.loads((GOLDEN / f"{name}.json").read_text())
        self.codec, self.rows = resolve_kv_format(name).v, data["rows"]
        assert (data["format"], data["width"]) == (name, 64)
        self.values = torch.from_numpy(self._bytes("values").view(np.float32).copy())
        self.codes = torch.from_numpy(self._bytes("codes"))
        self.scales = torch.from_numpy(self._bytes("scale").view(np.int16).copy()).flatten()

    def _bytes(self, field):
        return np.stack([np.frombuffer(bytes.fromhex(row[field]), np.uint8) for row in self.rows])

    def count(self, field):
        return sum(row[field] for row in self.rows)


@pytest.mark.parametrize("name", NAMES)
def test_torch_encodes_the_golden_inputs_to_the_golden_bytes(name):
    golden = Golden(name)
    codes, scales = golden.codec.encode(golden.values)
    assert torch.equal(codes, golden.codes)
    assert scales is None or torch.equal(scales.view(torch.int16), golden.scales)
    for row, values in zip(golden.rows, golden.values, strict=True):
        _, saturated, nonfinite = sanitize(golden.codec, values)
        assert (saturated, int(nonfinite.sum())) == (row["saturated"], row["nonfinite"])


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_kernel_stores_the_golden_bytes_and_counts(name):
    golden = Golden(name)
    codes, scales, attention, batch = write_values(name, golden.values)
    assert torch.equal(codes, golden.codes)
    assert not golden.codec.scaled or torch.equal(scales, golden.scales)
    assert attention.kv_counts() == [(golden.count("saturated"), golden.count("nonfinite"))]
    assert batch.nonfinite_rows.tolist() == [row["nonfinite"] > 0 for row in golden.rows]


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_inputs_reach_every_corner(name):
    golden = Golden(name)
    finite = golden.values[torch.isfinite(golden.values)]
    assert golden.count("nonfinite") == 3
    assert (golden.count("saturated") > 0) == (name != "fp32")
    assert finite.abs().max() > 3e38
    assert ((finite == 0) & torch.signbit(finite)).any()
    if not golden.codec.scaled:
        decoded = golden.codec.decode(golden.codes, None)
        assert torch.isfinite(decoded).all()
        assert decoded.abs().max() == torch.tensor(golden.codec.max_finite).float()


def test_the_golden_files_are_what_their_script_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(make_golden, "FOLDER", tmp_path)
    make_golden.main()
    for name in NAMES:
        assert (tmp_path / f"{name}.json").read_text() == (GOLDEN / f"{name}.json").read_text()
