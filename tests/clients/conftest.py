"""A fake daemon for each test and a client connected to it, and real daemons for the examples."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

from deepinfer.clients import Client
from deepinfer.daemon.keys import KeyStore

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "daemon"))

from daemon_process import Daemon, running
from fake_server import QUICK, FakeServer


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.endpoint, timeouts=QUICK) as client:
        yield client


@pytest.fixture(scope="session")
def endless_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that never ends an answer by itself, with a context that takes seconds to fill."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(tiny_path, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        # An id that the tokenizer does not have is never chosen.
        config |= {"eos_token_id": config.get("vocab_size", 264) - 1}
        if name == "config.json":
            config |= {"max_position_embeddings": 8192}
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def endless_daemon(endless_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(endless_path, tmp_path_factory.mktemp("e") / "run", "--max-cache", "32768") as daemon:
        yield daemon


class CurveDaemon(NamedTuple):
    """`friend` is the pair of a client that is let in."""

    folder: Path
    connection: dict[str, Any]
    server_key: str
    friend: tuple[str, str]


@pytest.fixture(scope="session")
def curve_daemon(endless_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CurveDaemon]:
    folder = tmp_path_factory.mktemp("k")
    store = KeyStore(folder / "keys")
    store.new_server()
    public, secret = zmq.curve_keypair()
    store.allow("friend", public)
    options = ["--curve", "--endpoint", "tcp://127.0.0.1:*", "--keys-dir", str(store.folder), "--num-blocks", "64"]
    with running(endless_path, folder / "run", *options) as daemon:
        key = store.server().public.decode()
        yield CurveDaemon(daemon.folder, daemon.connection, key, (public.decode(), secret.decode()))
