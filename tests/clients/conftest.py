"""A fake daemon for each test, and a client connected to it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepinfer.clients import Client

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "daemon"))

from fake_server import QUICK, FakeServer


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.endpoint, timeouts=QUICK) as client:
        yield client
