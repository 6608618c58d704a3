"""Builds the example clients and runs them. What cannot be built on this machine is skipped, with the reason."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq
from fake_server import FakeServer

SECONDS = 60.0
ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "clients" / "examples"
STAND_IN = Path(__file__).parent / "c"
NO_NETWORK = r"code (ENOTFOUND|EAI_AGAIN|ECONN\w+|ENET\w+|EHOSTUNREACH|ETIMEDOUT|ERR_SOCKET_TIMEOUT|E40[37]|E5\d\d)"


class Example(NamedTuple):
    """The two programs of an example, as words of a command."""

    client: list[str]
    subscriber: list[str]

    def run(self, folder: Path | None, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.client, *words], capture_output=True, encoding="utf-8", timeout=SECONDS, env=environment(folder)
        )


def environment(folder: Path | None) -> dict[str, str]:
    return {**os.environ, "DEEPINFER_RUNTIME_DIR": str(folder or "/nonexistent")}


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(folder))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def faked(folder: Path) -> Iterator[FakeServer]:
    """A fake daemon that can be found in `folder`."""
    with FakeServer() as server:
        (folder / "daemon.json").write_text(json.dumps({"endpoint": server.endpoint, "limits": {}}))
        yield server


def interrupted_after_first_text(command: list[str], folder: Path) -> tuple[str, str, int]:
    """The text, what was said beside it, and the exit code of a client that got SIGINT while it streamed."""
    with started(command, folder) as process:
        first = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=SECONDS)
        return (first + rest).decode(), said.decode(), process.returncode


def require(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def succeeds(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def node_example(folder: Path) -> Example:
    require("node", "npm")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.lstrip("v").split(".")[0]) < 20:
        pytest.skip(f"the example needs Node 20, this is {version.strip()}")
    # Node looks for packages beside the modules that import them.
    shutil.copytree(EXAMPLES / "node", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "node_modules").symlink_to(npm_packages() / "node_modules")
    return Example(["node", str(folder / "main.mjs")], ["node", str(folder / "metrics_subscriber.mjs")])


def npm_packages() -> Path:
    """A folder with the packages of the lock file, installed once."""
    source = EXAMPLES / "node"
    lock = (source / "package-lock.json").read_bytes()
    folder = ROOT / "build" / "node" / hashlib.sha256(lock).hexdigest()[:16]
    if not folder.exists():
        fresh = folder.with_name(f"{folder.name}-{os.getpid()}")
        shutil.copytree(source, fresh, ignore=shutil.ignore_patterns("node_modules", "*.mjs"))
        command = [
            "npm",
            "ci",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--fetch-retries=0",
            "--fetch-timeout=60000",
        ]
        installed = subprocess.run(command, cwd=fresh, capture_output=True, text=True, timeout=200)
        if installed.returncode != 0:
            shutil.rmtree(fresh)
            if offline := re.search(NO_NETWORK, installed.stderr):
                pytest.skip(f"the npm packages cannot be fetched: {offline[1]}")
            raise AssertionError(installed.stderr)
        try:
            fresh.rename(folder)
        except OSError:  # Another run was faster.
            shutil.rmtree(fresh)
    return folder


def c_example(folder: Path) -> Example:
    require("make", "cc")
    flags = "CFLAGS=-O2 -Wall -Wextra -Werror"
    command = ["make", "-C", str(EXAMPLES / "c"), f"BUILD={folder}", flags, *libzmq()]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return Example([str(folder / "client")], [str(folder / "metrics_subscriber")])


def libzmq() -> list[str]:
    """What make must be told to find libzmq: nothing where it is installed, else the one inside pyzmq."""
    if succeeds("pkg-config", "--exists", "libzmq"):
        return []
    folder = Path(zmq.__file__).parent.parent / "pyzmq.libs"
    bundled = sorted(folder.glob("libzmq*.so*"))
    if not bundled:
        pytest.skip("there is no libzmq: neither libzmq3-dev (for pkg-config) nor one inside pyzmq")
    return [f"ZMQ_CFLAGS=-I{STAND_IN}", f"ZMQ_LIBS={bundled[0]} -Wl,-rpath,{folder}"]
