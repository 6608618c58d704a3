"""The end of a daemon: who wished for it, how long running requests still get, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deepinfer.daemon.display import StartDisplay
from deepinfer.daemon.notify import ServiceManager
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.messages import Drain, Message

CUT_SECONDS = 10.0
EXIT_OK, EXIT_ENGINE_FAILED, EXIT_CONFIG = 0, 1, 78


class Stopping:
    """Wishes come from signals and from the control thread; the main thread calls `look`. The first SIGTERM or SIGINT
    drains, the second one cuts."""

    def __init__(
        self,
        drain_s: int,
        tell: Callable[[Message], None],
        board: StatusBoard,
        display: StartDisplay,
        manager: ServiceManager,
    ) -> None:
        self.drain_s = drain_s
        self._tell, self._board, self._display, self._manager = tell, board, display, manager
        self._wishes = 0
        self._wished_cut = False
        self._seconds: int | None = None
        self._began: float | None = None
        self._cut_at: float | None = None

    @property
    def wished(self) -> bool:
        return self._wishes > 0

    @property
    def cut(self) -> bool:
        """Admission was told to cut."""
        return self._cut_at is not None

    def on_signal(self, *_: Any) -> None:
        """Only notes the wish, and the watch looks ten times a second: it may run anywhere, even inside the lock of an
        Event."""
        self._wished_cut = self._wished_cut or self._wishes > 0
        self._wishes += 1

    def wish(self, now: bool = False, seconds: int | None = None) -> None:
        """`seconds`: how long running requests get, if not as long as the configuration says."""
        self._wished_cut = self._wished_cut or now
        self._seconds = self._seconds if seconds is None else seconds
        self._wishes += 1
        self._board.changed.set()

    @property
    def patience(self) -> int:
        return self.drain_s if self._seconds is None else self._seconds

    def look(self) -> int | None:
        """One look at a stop under way; the exit code when the daemon may end now."""
        now = time.monotonic()
        self._manager.stopping()
        if self._board.phase == "loading":
            return EXIT_OK
        if self._began is None:
            self._began = now
            if not self._wished_cut:
                self._tell(Drain(now=False))
                self._display.stopping(False)
        if self._cut_at is None and (self._wished_cut or now > self._began + self.patience):
            self._cut_at = now
            self._tell(Drain(now=True))
            self._display.stopping(True)
        if self._cut_at is not None and now > self._cut_at + CUT_SECONDS:
            self._display.failed(f"the engine did not stop within {CUT_SECONDS:.0f} s and is killed")
            return EXIT_ENGINE_FAILED
        return None
