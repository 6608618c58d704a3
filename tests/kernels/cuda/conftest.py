"""The back end that runs the kernels in these tests: the host shim, which is always there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent))


@pytest.fixture(scope="session")
def backend():
    from deepinfer.kernels.cuda.host_backend import HostBackend

    return HostBackend()
