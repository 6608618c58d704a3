"""Keeps an engine process running: starts it, notices its death, starts another one, and knows when to give up."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from deepinfer.daemon.child import EngineProcess
from deepinfer.daemon.config import DaemonConfig, EngineConfig
from deepinfer.daemon.topology import Topology, two_processes
from deepinfer.daemon.watchdog import ADMISSION, Watchdog
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.messages import EngineDied, Message

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = (0.5, 60.0)
"""How long the messages of a dead engine may take to be read: after a crash, after an orderly end. Admission reads them
when it has done what it is at, and tokenising a huge prompt on a busy machine takes that long."""
LOADING_SHARE = 4.0
"""Of the bound, while an engine loads: importing a library from a slow disk may stop every thread of it."""
GIVE_UP_SECONDS = 10.0
"""How long admission may take to end every stream when no engine comes any more."""


class RestartBudget:
    """`limit` restarts in a row. A row ends when an engine has produced a token, when a request was found to have
    killed the last ones, and when an engine has been ready for `window_s`."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._advances = 0
        self.in_a_row = 0

    def allow(self, advances: int, ready_s: float) -> bool:
        """An engine has died. `advances`: tokens and culprits so far; `ready_s`: how long this one was ready."""
        if advances > self._advances or ready_s > self._window_s:
            self.in_a_row = 0
        self._advances = advances
        self.in_a_row += 1
        return self.in_a_row <= self._limit


class Supervisor:
    """Owned by the front's main thread, which calls `look` several times a second. `tell` sends to admission."""

    def __init__(
        self,
        config: DaemonConfig,
        folder: Path,
        topology: Topology,
        board: StatusBoard,
        tell: Callable[[Message], None],
    ) -> None:
        self._config = config
        self._folder = folder
        self._topology = topology
        self._board = board
        self._tell = tell
        self._budget = RestartBudget(config.max_restarts, config.restart_window_s)
        self._vocabulary: tuple[int, tuple[int, ...]] | None = None
        self._generation = 0
        self._process: EngineProcess
        self._watchdog: Watchdog
        self._ready_at: float | None = None
        self._died_at: float | None = None
        self._hang = ""
        """Why we have killed it, in words."""
        self._told_end = False
        self.cut = False
        """Running requests are being cut: an engine that dies now is not replaced."""
        self._start(config.engine())

    def introduce(self, num_valid_tokens: int, eos_token_ids: Iterable[int]) -> None:
        """Tell the engine, and every one after it, of the vocabulary."""
        self._vocabulary = (num_valid_tokens, tuple(eos_token_ids))
        self._process.send_vocabulary(*self._vocabulary)

    def set_log_level(self, level: str) -> None:
        """Of this engine and of every one after it."""
        if level != self._config.log_level:
            self._config = dataclasses.replace(self._config, log_level=level)
            self._process.send_log_level(level)

    def look(self) -> None:
        now = time.monotonic()
        if self._ready_at is None and self._board.ready_pid == self._process.pid:
            self._ready_at = now
        code = self._process.ended()
        if code is not None and not self._board.over:
            self._notice_death(code, now)
        elif self._ready_at is None and now > self._start_by:
            self._overdue()
        elif not self.cut:
            self._watch(now)

    def end(self) -> None:
        """The engine is gone when this returns, by force if it must be."""
        self._process.end()

    def _overdue(self) -> None:
        words = f"the engine was not ready after {self._config.start_timeout_s} s"
        if self._generation == 0:
            self._board.fail(words)
        else:
            self._hang = words
            self._process.kill()

    def _watch(self, now: float) -> None:
        """A stage that has work and does not move is named; if it stays so, the engine is as good as dead."""
        share = LOADING_SHARE if self._ready_at is None else 1.0
        board, watchdog = self._board, self._watchdog
        watchdog.look(now, board.turns, *board.heartbeat)
        board.health = watchdog.report()
        suspect = watchdog.stalled(share / 2)
        if suspect and not board.hung:
            logger.warning("%s has work and does not move", suspect)
        board.hung = suspect
        hung = watchdog.stalled(share)
        if hung and hung != ADMISSION:
            seconds = share * self._config.hang_timeout_s
            self._hang = f"the engine hung: {hung} had work and did not move for {seconds:.0f} s"
            logger.error("%s; it is killed", self._hang)
            self._process.kill()

    def _start(self, config: EngineConfig) -> None:
        self._ready_at = self._died_at = None
        self._hang = self._board.hung = ""
        self._watchdog = Watchdog(self._config.hang_timeout_s, time.monotonic())
        self._start_by = time.monotonic() + self._config.start_timeout_s
        self._process = EngineProcess(config, self._topology)
        self._board.info["engine_pid"] = self._process.pid
        if self._vocabulary is not None:
            self._process.send_vocabulary(*self._vocabulary)

    def _notice_death(self, code: int, now: float) -> None:
        """A death while the first engine loads, an orderly end and the end of our patience are final. Then the last
        words may still be on their way to admission, which may be busy, and say more than an exit code; after an
        orderly end they are the ends of streams, so they get more time then."""
        if self._died_at is None:
            self._died_at = now
            if code != 0 and self._may_restart(now):
                self._restart()
                return
        patience = LAST_WORDS_SECONDS[code == 0]
        if not self._told_end and now > self._died_at + patience:
            self._told_end = True
            self._tell(EngineDied(error=self._hang or self._process.death()))
        elif now > self._died_at + patience + GIVE_UP_SECONDS:
            self._board.fail(self._hang or self._process.death())

    def _may_restart(self, now: float) -> bool:
        if self.cut or (self._generation == 0 and self._ready_at is None):
            return False
        ready_s = 0.0 if self._ready_at is None else now - self._ready_at
        allowed = self._budget.allow(self._board.advances, ready_s)
        if not allowed:
            logger.error("%d engines died in a row; no other is started", self._budget.in_a_row)
        return allowed

    def _restart(self) -> None:
        """With the pool and the context of the first engine: every request that was accepted fits into that one."""
        error = self._hang or self._process.death()
        running = self._process.running()
        self._process.end()
        logger.warning("%s; a new one is started (%d in a row)", error, self._budget.in_a_row)
        for address in (self._topology.admission, self._topology.decode):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        self._generation += 1
        self._topology = two_processes(self._folder, self._config.endpoint, self._generation)
        num_blocks, context = self._board.summary["num_blocks"], self._board.summary["context"]
        again = dataclasses.replace(self._config.engine(), num_blocks=num_blocks, max_cache=None, max_context=context)
        self._start(again)
        admission, decode = self._topology.admission, self._topology.decode
        self._tell(EngineDied(error=error, admission=admission, decode=decode, running=running))
