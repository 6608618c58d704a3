"""The command that a user proves his kernels with."""

from __future__ import annotations

import json

import pytest

from deepinfer.daemon import validate_kernels


@pytest.mark.parametrize(
    ("device", "backend", "checks"), [("cpu", "cpu-native", 22), ("host-emulation", "host-emulation", 15)]
)
def test_every_kernel_is_within_its_limits_and_the_report_names_the_backend(device, backend, checks, tmp_path):
    output = tmp_path / "report.json"
    assert validate_kernels.run_validation(device, None, output) == 0
    report = json.loads(output.read_text())
    assert report["backend"] == backend
    assert len(report["checks"]) == checks
    assert all(check["passed"] and check["unequal_bytes"] == 0 for check in report["checks"])


@pytest.mark.parametrize("bound", ["MAX_ABS_ERROR", "BF16_ABS_ERROR"])
def test_a_kernel_outside_its_limits_ends_with_code_1(monkeypatch, bound):
    """The control arm: a bound that nothing can meet."""
    monkeypatch.setattr(validate_kernels, bound, 1e-9)
    assert validate_kernels.run_validation("cpu", None, None) == 1


def test_a_whole_model_is_compared_with_a_dense_attention(tiny_path, capsys):
    assert validate_kernels.run_validation("cpu", str(tiny_path), None) == 0
    shown = capsys.readouterr().out
    assert "auto, logits, same argmax" in shown
