"""A real daemon in a folder of its own, for stress runs that kill parts of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from deepinfer.daemon.log import for_people
from deepinfer.daemon.runtime_folder import CONNECTION_FILE, LOG_FILE

START_SECONDS = 300.0
END_SECONDS = 60.0
GONE_SECONDS = 5.0
POLL_SECONDS = 0.02
LAST_LINES = 12


class DaemonFailed(RuntimeError):
    """It did not start, or did not end."""


class RealDaemon:
    """`start` in the foreground of a process of its own. `with` starts nothing; it makes sure that nothing is left.

    A Ctrl-C is the run's alone, so the daemon has a process group of its own; but it stays in the run's session. Linux
    shares the cores out among sessions first (autogroups), and where all cores are busy, those of one session have been
    seen to keep every other one waiting for up to half a second. A run would measure that, and not the daemon.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="dk"))
        self.folder = self._home / "run"
        self._log = self._home / "log"
        command = [sys.executable, "-m", "deepinfer.daemon.cli", "start", "--runtime-dir", str(self.folder), *options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)

    def wait_ready(self) -> None:
        """Raises DaemonFailed."""
        give_up = time.monotonic() + START_SECONDS
        while not (self.folder / CONNECTION_FILE).exists():
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise DaemonFailed(f"the daemon did not become ready: {self.last_words()}")
            time.sleep(POLL_SECONDS)

    def engine(self) -> psutil.Process | None:
        """The engine process of this moment."""
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return None
        living = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        return living[0] if living else None

    def descriptors(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def files(self) -> int:
        return len(list(self.folder.iterdir()))

    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_end(self) -> tuple[int, list[str]]:
        """Its exit code, and what it has left behind. Raises DaemonFailed when it does not end."""
        engine = self.engine()
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise DaemonFailed(f"the daemon did not end within {END_SECONDS:.0f} s: {self.last_words()}") from None
        left = [f"the file {path.name}" for path in self.folder.iterdir() if path.name != LOG_FILE]
        if engine is not None and psutil.wait_procs([engine], timeout=GONE_SECONDS)[1]:
            left.append(f"the engine process {engine.pid}")
        return code, left

    def last_words(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def log_lines(self, words: str) -> list[str]:
        """Those with these words in them."""
        return [for_people(line) for line in self._log.read_text(errors="replace").splitlines() if words in line]

    def __enter__(self) -> RealDaemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine = self.engine()
        self.process.kill()
        self.process.wait()
        if engine is not None and psutil.wait_procs([engine], timeout=GONE_SECONDS)[1]:
            engine.kill()
        shutil.rmtree(self._home, ignore_errors=True)
