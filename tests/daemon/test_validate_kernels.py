"""The command that a user proves his kernels with."""

from __future__ import annotations

import json

import pytest

from deepinfer.daemon import validate_kernels


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cpu-native"), ("host-emulation", "host-emulation")])
def test_every_kernel_is_within_its_limits_and_the_report_names_the_backend(device, backend, tmp_path):
    output = tmp_path / "report.json"
    assert validate_kernels.run_validation(device, None, output) == 0
    report = json.loads(output.read_text())
    assert report["backend"] == backend
    assert len(report["checks"]) == 15
    assert all(check["passed"] and check["unequal_bytes"] == 0 for check in report["checks"])


def test_a_kernel_outside_its_limits_ends_with_code_1(monkeypatch):
    """The control arm: a bound that nothing can meet."""
    monkeypatch.setattr(validate_kernels, "MAX_ABS_ERROR", 1e-9)
    assert validate_kernels.run_validation("cpu", None, None) == 1


def test_a_whole_model_is_compared_with_a_dense_attention(tiny_path, capsys):
    assert validate_kernels.run_validation("cpu", str(tiny_path), None) == 0
    shown = capsys.readouterr().out
    assert "auto, logits, same argmax" in shown
