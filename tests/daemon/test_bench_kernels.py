"""The bench of the kernels runs everywhere, at a size at which its times mean nothing. No time is asserted."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from deepinfer.daemon.bench import kernels as bench_kernels
from deepinfer.daemon.bench.attention import Heads, _block
from deepinfer.daemon.bench.kernels import Plan, run_bench_kernels
from deepinfer.daemon.bench.matmul import ROWS, Shape
from deepinfer.daemon.cli import main
from deepinfer.kernels import resolve_kv_format

HEADS = (Heads("tiny", 2, 1, 64),)
SHAPE = Shape("tiny", 2, 64, 2, 1, 64, 96, 320)
FORMATS = ("fp16", "int8", "fp8_e4m3/fp8_e5m2")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("deepinfer.daemon.bench.timing.SHORTEST", 0.0)
    monkeypatch.setattr(bench_kernels, "_instructions", lambda plan: {"rows": []})


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cpu-native"), ("host-emulation", "host-emulation")])
def test_paged_decode_of_every_format_is_reported_beside_a_copy(device, backend, tmp_path):
    output = tmp_path / "bench.json"
    run_bench_kernels(device, 2, 1, output, Plan(HEADS, (16, 40), (1, 2), 1 << 15, formats=FORMATS))
    report = json.loads(output.read_text())
    assert report["backend"] == backend
    assert {"command", "machine", "versions", "definitions"} <= report.keys()
    rows = report["paged_decode"]
    assert [(row["context"], row["batch"], row["format"]) for row in rows] == [
        (context, batch, name) for context in (16, 40) for batch in (1, 2) for name in FORMATS
    ]
    assert all(row["gb_per_s"]["median"] > 0 and row["copy_gb_per_s"]["median"] > 0 for row in rows)
    assert all(row["speed_of_fp16"]["median"] == 1 for row in rows if row["format"] == "fp16")


def test_the_gemv_and_a_step_with_and_without_graphs_are_reported_where_there_are_graphs(tmp_path):
    plan = Plan((), (), (), 1 << 12, (SHAPE,), SHAPE, 32)
    report = run_bench_kernels("host-emulation", 1, 1, tmp_path / "bench.json", plan)
    assert [(row["matrix"], row["rows"]) for row in report["gemv"]] == [
        (matrix, rows) for matrix in ("qkv", "o", "gate_up", "down") for rows in ROWS
    ]
    assert all(report["step"][name]["of_roofline"]["median"] > 0 for name in ("computed", "replayed"))
    assert report["step"]["bytes_read"] > 0


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_of_a_block_are_those_of_its_layout(name):
    layout = resolve_kv_format(name).layout(3, 2, 64, 16)
    block = _block(layout)
    assert block.shape == (layout.block_bytes,)
    offsets = layout.layer_offsets(1)
    keys = layout.k.decode(
        block[offsets.k : offsets.k + layout.k_bytes].view(2, 16, -1),
        block[offsets.k_scales : offsets.k_scales + 64].view(torch.float16).view(2, 16) if layout.k.scaled else None,
    )
    assert 0.9 < float(keys.std()) < 1.1


def test_a_device_that_is_not_there_is_refused_in_one_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = CliRunner().invoke(main, ["bench", "kernels", "--device", "cuda"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: device is cuda, but")
