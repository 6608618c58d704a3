"""The engine process as its parent sees it: one child, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable

from deepinfer.daemon.config import EngineConfig
from deepinfer.daemon.engine_process import log_level_line, start_line, vocabulary_line
from deepinfer.daemon.topology import Topology
from deepinfer.stages.flight_record import RECORD_BYTES, FlightRecord

KILL_AFTER_SECONDS = 5.0


class EngineProcess:
    """In a process group of its own, so that a Ctrl-C meant for the front does not reach it. Its standard input is the
    tether: when the front dies, for whatever reason, the engine reads the end of it and exits.

    The group belongs to the front's session. So one that is stopped when the front dies, even before it could ask for a
    death signal, is an orphan with a stopped member, and the kernel sends such a group SIGHUP and SIGCONT."""

    def __init__(self, config: EngineConfig, topology: Topology) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(RECORD_BYTES)
            self._record = FlightRecord(file.fileno())
            self._process = self._spawn(file.fileno())
            self._write(start_line(config, topology, file.fileno()))

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "deepinfer.daemon.engine_process"],
            pass_fds=(descriptor,),
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=sys.stderr,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_vocabulary(self, num_valid_tokens: int, eos_token_ids: Iterable[int]) -> None:
        self._write(vocabulary_line(num_valid_tokens, eos_token_ids))

    def send_log_level(self, level: str) -> None:
        self._write(log_level_line(level))

    def ended(self) -> int | None:
        """Its exit code, or None while it lives."""
        return self._process.poll()

    def death(self) -> str:
        """How it ended, in words. Waits for the end."""
        code = self._process.wait()
        if code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"

    def running(self) -> list[int]:
        """The requests that it was computing when it died."""
        return self._record.running()

    def kill(self) -> None:
        """By force; `ended` notices it."""
        self._process.kill()

    def end(self) -> None:
        """Make sure that it is gone: first by cutting the tether, then by force."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(KILL_AFTER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._record.close()

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # It died already; `death` says how.
            if self._process.stdin is not None:
                self._process.stdin.write(line)
