"""How a client finds its daemon, and that it needs nothing of the daemon's code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer

from deepinfer.clients import Client, NoDaemonError, Timeouts
from deepinfer.clients.discovery import CONNECTION_FILE, locate, runtime_dir


def test_the_runtime_folder_follows_the_environment_in_a_fixed_order():
    everything = {"DEEPINFER_RUNTIME_DIR": "/a", "RUNTIME_DIRECTORY": "/b:/c", "XDG_RUNTIME_DIR": "/d"}
    assert runtime_dir(everything) == Path("/a")
    del everything["DEEPINFER_RUNTIME_DIR"]
    assert runtime_dir(everything) == Path("/b")
    del everything["RUNTIME_DIRECTORY"]
    assert runtime_dir(everything) == Path("/d/deepinfer-daemon")
    assert str(os.getuid()) in runtime_dir({}).name


def write_connection(folder: Path, **content: object) -> Path:
    path = folder / CONNECTION_FILE
    path.write_text(json.dumps(content))
    return path


def test_a_client_connects_by_file_by_folder_and_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_RUNTIME_DIR", str(tmp_path))
    with FakeServer() as server:
        path = write_connection(
            tmp_path,
            endpoint=server.endpoint,
            pid=os.getpid(),
            model="fake",
            protocol=1,
            limits={"max_frame_bytes": 1000},
            something_new=True,
        )
        for where in (path, str(path), tmp_path, None):
            with Client(where) as client:
                assert client.connection.model == "fake"
                assert client.connection.max_frame_bytes == 1000
                assert client.complete("echo a").text == "a"


def test_no_connection_file_means_no_daemon(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_RUNTIME_DIR", str(tmp_path / "nothing"))
    with pytest.raises(NoDaemonError, match=r"no daemon is running.*daemon\.json"):
        Client()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"endpoint": 3}', "\x00\xff"])
def test_a_file_that_is_no_connection_file_is_a_clear_error(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(NoDaemonError, match=r"x\.json"):
        locate(path)


def test_a_connection_file_that_a_dead_daemon_left_is_named_as_such(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_connection(tmp_path, endpoint=f"ipc://{tmp_path}/gone", pid=dead.pid)
    with pytest.raises(NoDaemonError, match=f"left by process {dead.pid}"):
        Client(tmp_path, timeouts=Timeouts(connect=0.2))


def test_the_clients_need_neither_the_daemon_nor_its_dependencies():
    script = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        allowed = {"zmq", "msgpack", "deepinfer"} | set(sys.stdlib_module_names)
        ours = top == "deepinfer" and name.split(".")[1:2] not in ([], ["clients"])
        if top not in allowed or ours:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
from deepinfer.clients import AsyncClient, Client
assert "zmq" in sys.modules and "msgpack" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
