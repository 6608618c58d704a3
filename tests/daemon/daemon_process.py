"""Runs the real command in real processes, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from deepinfer.clients import DeepInferError, Stream

CLI = [sys.executable, "-m", "deepinfer.daemon.cli"]
START_SECONDS = 90.0
END_SECONDS = 20.0


class Daemon:
    """A `start` in the foreground of its own process group."""

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        self.folder = folder
        self.log = folder.parent / f"{folder.name}.log"
        command = [*CLI, "start", "--model", str(model), "--runtime-dir", str(folder), *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self) -> dict[str, Any]:
        give_up = time.monotonic() + START_SECONDS
        while not self._published():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < give_up, self.log.read_text()
            time.sleep(0.02)
        return self.connection

    def _published(self) -> bool:
        """By this daemon, not by one before it that was killed."""
        try:
            return self.connection["pid"] == self.process.pid
        except FileNotFoundError:
            return False

    @property
    def connection(self) -> dict[str, Any]:
        return json.loads((self.folder / "daemon.json").read_text())

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_end(self, seconds: float = END_SECONDS) -> int:
        return self.process.wait(seconds)

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_cli(*arguments, runtime_dir=self.folder)


def run_cli(*arguments: str, runtime_dir: Path, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEEPINFER_RUNTIME_DIR": str(runtime_dir)}
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=seconds, env=environment)


@contextmanager
def running(model: Path, folder: Path, *options: str) -> Iterator[Daemon]:
    """A ready daemon; killed at the end if the test has not ended it, and nothing of it may be left then."""
    with started(model, folder, *options) as daemon:
        daemon.wait_ready()
        yield daemon


@contextmanager
def started(model: Path, folder: Path, *options: str) -> Iterator[Daemon]:
    """The same without the wait: one that has only just begun to load, or is about to refuse its settings."""
    daemon = Daemon(model, folder, *options)
    try:
        yield daemon
    finally:
        children = daemon.children() if daemon.process.poll() is None else []
        if daemon.process.poll() is None:
            os.killpg(daemon.process.pid, signal.SIGKILL)
            daemon.process.wait()
        _, alive = psutil.wait_procs(children, timeout=6)
        for process in alive:
            process.kill()
        assert not alive, "the engine outlived its front"


def nothing_left(folder: Path) -> None:
    """No socket, no lock, no connection file; the log may stay."""
    left = {path.name for path in folder.iterdir()} - {"daemon.log"} if folder.exists() else set()
    assert left == set()


def endings_of(streams: Iterable[Stream]) -> list[str]:
    """How each ended: its finish reason, or the code of its error."""
    endings = []
    for stream in streams:
        try:
            endings.append(stream.result().finish_reason)
        except DeepInferError as error:
            endings.append(error.code)
    return endings
