"""One runtime folder in which a daemon is started again and again, and everything that one may leave behind."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from deepinfer.daemon.runtime_folder import CONNECTION_FILE, LOG_FILE, is_locked

MARK = "STRESS_CYCLES_RUN"
"""An environment variable that every process of a run inherits."""
POLL_SECONDS = 0.03
LAST_LINES = 12
SHARED_MEMORY = Path("/dev/shm")
SYSTEM_V = Path("/proc/sysvipc/shm")


class Site:
    """`start` and its processes. `with` makes sure that nothing of them is left."""

    def __init__(self, options: Sequence[str]) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="dc"))
        self.folder = self._home / "run"
        self._options = list(options)
        self._mark = secrets.token_hex(8)
        self._log = self._home / "log"
        self._temporary = self._home / "tmp"
        self._temporary.mkdir()
        self._pids: set[int] = set()

    def start(self, detach: bool) -> Launch:
        command = [sys.executable, "-m", "deepinfer.daemon.cli", "start", "--runtime-dir", str(self.folder)]
        environment = {**os.environ, MARK: self._mark, "TMPDIR": str(self._temporary)}
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [*command, *self._options, *(["--detach"] if detach else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return Launch(self, process, detach)

    def processes(self) -> list[psutil.Process]:
        """Those that live and were started here, whoever their parents are by now."""
        mine = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    mine.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        self._pids |= {process.pid for process in mine}
        return mine

    def wait_empty(self, seconds: float) -> list[psutil.Process]:
        """What still lives after so long."""
        give_up = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS)
        return left

    def files(self) -> list[str]:
        """In the runtime folder, but for the log."""
        return sorted(path.name for path in self.folder.iterdir() if path.name != LOG_FILE)

    def temporary_files(self) -> list[str]:
        return sorted(path.name for path in self._temporary.iterdir())

    def shared_memory(self) -> list[str]:
        """Segments that name a process of this run, or were made by one."""
        left = []
        if SHARED_MEMORY.is_dir():
            left += [path.name for path in SHARED_MEMORY.iterdir() if any(str(pid) in path.name for pid in self._pids)]
        if SYSTEM_V.exists():
            rows = [line.split() for line in SYSTEM_V.read_text().splitlines()]
            creator = rows[0].index("cpid")
            left += [f"System V segment {row[1]}" for row in rows[1:] if int(row[creator]) in self._pids]
        return left

    def locked(self) -> bool:
        return is_locked(self.folder)

    def ready(self, front: psutil.Process | None) -> bool:
        """Whether this front says so, and not one before it that was killed."""
        try:
            return front is not None and json.loads((self.folder / CONNECTION_FILE).read_text())["pid"] == front.pid
        except FileNotFoundError:
            return False

    def last_words(self) -> str:
        logs = [path for path in (self._log, self.folder / LOG_FILE) if path.exists()]
        return " / ".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def kill_all(self) -> None:
        for process in self.processes():
            process.kill()
        self.wait_empty(10)

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        shutil.rmtree(self._home, ignore_errors=True)


class Launch:
    """One `start`. Detached, the process that we started is not the front but its parent for a while."""

    def __init__(self, site: Site, process: subprocess.Popen[bytes], detach: bool) -> None:
        self._site, self.process, self._detach = site, process, detach
        self._front = None if detach else psutil.Process(process.pid)

    def front(self) -> psutil.Process | None:
        """None while, or if, there is none."""
        if self._front is None:
            children = _children(self.process.pid)
            self._front = children[0] if children else None
        return self._front

    def ready(self) -> bool:
        return self._site.ready(self.front())

    def engine(self) -> psutil.Process | None:
        front = self.front()
        children = [] if front is None else _children(front.pid)
        return children[0] if children else None

    def over(self) -> bool:
        """The front has ended, or there will be none."""
        front = self.front()
        if front is None:
            return self.process.poll() is not None
        if not self._detach:
            return self.process.poll() is not None
        try:
            return not front.is_running() or front.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def exit_code(self) -> int | None:
        """That of the front, when it is our child; or of a detached start that has failed. None: nobody can know."""
        code = self.process.wait()
        return code if not self._detach or code != 0 else None


def _children(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children()
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []
