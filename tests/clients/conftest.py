"""A fake daemon for each test, and a client connected to it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepinfer.clients import Client, Timeouts

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import FakeServer

QUICK = Timeouts(connect=2.0, call=2.0, idle=0.3, close=1.0)


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.endpoint, timeouts=QUICK) as client:
        yield client
