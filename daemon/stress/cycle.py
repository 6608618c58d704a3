"""One cycle: a daemon is started, hit, and has ended; and what of that was not as documented."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

from deepinfer.clients import Client, DeepInferError, Preempted, Stream, Token
from deepinfer.daemon.commands import EXIT_READY, stop_daemon
from deepinfer.daemon.stress.cycle_plan import Plan
from deepinfer.daemon.stress.cycles_config import CyclesConfig
from deepinfer.daemon.stress.site import POLL_SECONDS, Launch, Site

START_SECONDS = 300.0
MOMENT_SECONDS = 60.0
ORPHAN_SECONDS = 5.0
"""After which no engine may outlive its front."""
READY_DELAY, STOP_DELAY, BLOW_PAUSE = 0.3, 1.0, 1.0


class Seen(NamedTuple):
    plan: Plan
    start_seconds: float | None
    """Until it was ready; None if it was hit before."""
    end_seconds: float
    faults: list[tuple[str, str]]
    """The check that failed, and how."""


class Load:
    """Streams that are read by a thread each, and what has come of them."""

    def __init__(self, client: Client, config: CyclesConfig, number: int) -> None:
        self.tokens = self.preempted = 0
        self.ends: list[str] = []
        self._lock = threading.Lock()
        streams = [
            client.generate(f"{number} {place} is the number", max_new_tokens=config.new_tokens, ignore_eos=True)
            for place in range(config.streams)
        ]
        self._threads = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in streams]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Stream) -> None:
        try:
            for event in stream:
                with self._lock:
                    self.tokens += isinstance(event, Token)
                    self.preempted += isinstance(event, Preempted)
            end = stream.result().finish_reason
        except DeepInferError as error:
            end = error.code
        with self._lock:
            self.ends.append(end)

    def over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, seconds: float) -> bool:
        """Until every stream has ended, or nothing has come for so long; whether they have."""
        seen, last = -1, time.monotonic()
        while not self.over():
            so_far = self.tokens + self.preempted + len(self.ends)
            if so_far != seen:
                seen, last = so_far, time.monotonic()
            elif time.monotonic() > last + seconds:
                return False
            time.sleep(POLL_SECONDS)
        return True


class Cycle:
    """Used once. `load_seconds`: how long a start takes."""

    def __init__(self, site: Site, config: CyclesConfig, plan: Plan, load_seconds: float) -> None:
        self._site, self._config, self._plan = site, config, plan
        self._load_seconds = load_seconds
        self._faults: list[tuple[str, str]] = []
        self._client: Client | None = None
        self._load: Load | None = None
        self._ready_after: float | None = None

    def run(self) -> Seen:
        began = time.monotonic()
        launch = self._site.start(self._plan.detach)
        try:
            if self._reach(launch, began):
                self._strike(launch)
            struck = time.monotonic()
            self._finish(launch)
        finally:
            if self._client is not None:
                self._client.close()
        ended = time.monotonic()
        self._look(launch, ended - struck)
        return Seen(self._plan, self._ready_after, ended - struck, self._faults)

    def _fault(self, check: str, how: str) -> None:
        self._faults.append((check, how))

    # --- until the blow ---------------------------------------------------------------------------------------

    def _reach(self, launch: Launch, began: float) -> bool:
        """Wait for the moment of the plan. False when the daemon did not get there."""
        if self._plan.moment == "loading":
            return self._wait(lambda: self._victim(launch) is not None or launch.over(), START_SECONDS) and (
                self._sleep(self._plan.delay * self._load_seconds, launch)
            )
        if not self._wait(lambda: launch.ready() or launch.over(), START_SECONDS) or launch.over():
            self._fault("every start works", f"it did not become ready: {self._site.last_words()}")
            return False
        if self._plan.detach:
            launch.process.wait()
        self._ready_after = time.monotonic() - began
        if self._plan.moment == "ready":
            return self._sleep(self._plan.delay * READY_DELAY, launch)
        return self._reach_load(launch)

    def _reach_load(self, launch: Launch) -> bool:
        try:
            self._client = Client(self._site.folder / "daemon.json")
            load = self._load = Load(self._client, self._config, self._plan.number)
        except DeepInferError as error:
            self._fault("every start works", f"it answers nobody: {error}")
            return False
        wished = 1 + int(self._plan.delay * self._config.streams * self._config.new_tokens / 4)
        wait_swap = self._plan.moment == "swap"
        self._wait(lambda: load.over() or (load.preempted if wait_swap else load.tokens >= wished), MOMENT_SECONDS)
        front = launch.front()
        if self._plan.moment == "stopping" and front is not None:
            front.terminate()
            self._sleep(self._plan.delay * STOP_DELAY, launch)
        return True

    def _victim(self, launch: Launch) -> psutil.Process | None:
        return launch.front() if self._plan.victim == "front" else launch.engine()

    def _wait(self, condition: Callable[[], object], seconds: float) -> bool:
        give_up = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > give_up:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _sleep(self, seconds: float, launch: Launch) -> bool:
        self._wait(launch.over, seconds)
        return True

    # --- the blow and the end ---------------------------------------------------------------------------------

    def _strike(self, launch: Launch) -> None:
        victim = self._victim(launch)
        if victim is None:
            return
        pause = self._plan.pause * BLOW_PAUSE
        try:
            match self._plan.blow:
                case "kill":
                    victim.kill()
                case "term":
                    victim.terminate()
                case "int":
                    victim.send_signal(signal.SIGINT)
                case "twice":
                    victim.terminate()
                    time.sleep(pause)
                    victim.terminate()
                case "freeze":
                    if (engine := launch.engine()) is not None:
                        engine.suspend()
                    time.sleep(pause)
                    victim.kill()
                case "stop":
                    victim.suspend()
                    time.sleep(pause)
                    victim.kill()
        except psutil.NoSuchProcess:
            pass  # It has just ended by itself, as it may while the daemon stops.

    def _finish(self, launch: Launch) -> None:
        """Until the front has ended; one that has no reason to end is told to."""
        if self._faults:  # It was never struck.
            self._site.kill_all()
        bound = self._config.end_s + self._config.drain_s
        if self._load is not None and not self._load.wait(bound):
            self._fault("every stream ends", f"{len(self._load.ends)} ended, then nothing came for {bound:.0f} s")
        told = self._plan.victim == "front" or self._plan.moment == "stopping"
        if not told and not launch.over():
            self._stop(launch, bound)
        if not self._wait(launch.over, bound):
            self._fault("every daemon ends", f"it still runs after {bound:.0f} s: {self._site.last_words()}")
            self._site.kill_all()

    def _stop(self, launch: Launch, bound: float) -> None:
        if self._plan.survives:
            code, words = stop_daemon(self._site.folder, now=False)
            if code != EXIT_READY:
                self._fault("every daemon ends", f"`stop` ended with {code}: {words}: {self._site.last_words()}")
            return
        # While it loads it may be about to end by itself, or go on as if nothing had been.
        self._wait(lambda: launch.over() or launch.ready(), bound)
        front = launch.front()
        if front is not None and not launch.over():
            front.terminate()

    # --- what is left -----------------------------------------------------------------------------------------

    def _look(self, launch: Launch, seconds: float) -> None:
        if left := self._site.wait_empty(ORPHAN_SECONDS):
            self._fault("no process is left", ", ".join(f"{process.pid} {_command(process)}" for process in left))
            self._site.kill_all()
        code = launch.exit_code()
        if code is not None and code not in self._allowed_codes():
            self._fault("exit codes are as documented", f"{code}: {self._site.last_words()}")
        # One that is just ending gives up its memory, by which we know it, a moment before its files.
        if not self._wait(lambda: not self._site.locked(), ORPHAN_SECONDS):
            self._fault("nobody holds the lock", "somebody does")
        crashed = self._plan.crash or (code is not None and code < 0)
        if not crashed and self._site.folder.exists() and (files := self._site.files()):
            self._fault("no file is left", ", ".join(files))
        if self._load is not None:
            ends = set(self._load.ends) - self._plan.stream_ends(seconds, self._config.drain_s)
            if ends:
                self._fault("streams end as documented", f"{sorted(ends)}: {self._site.last_words()}")

    def _allowed_codes(self) -> tuple[int, ...]:
        """A detached start says 1 for a front that was killed."""
        return (*self._plan.exit_codes(), 1) if self._plan.detach else self._plan.exit_codes()


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.status()}: {' '.join(process.cmdline()[1:4])}"
    except psutil.NoSuchProcess:
        return "ended just now"
