"""What every test of real processes needs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short, because a socket path is."""
    return tmp_path_factory.mktemp("d", numbered=True) / "run"
