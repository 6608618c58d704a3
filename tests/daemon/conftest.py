"""What every test of real processes needs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# Tests that were started with nohup would pass on to their daemons that SIGHUP is ignored, with which the kernel ends a
# stopped engine whose front is gone.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short, because a socket path is."""
    return tmp_path_factory.mktemp("d", numbered=True) / "run"
