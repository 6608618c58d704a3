"""The front process: admission, control, and the life of the engine process. It never touches a tensor."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import zmq

from deepinfer.daemon.config import DaemonConfig
from deepinfer.daemon.control import ControlStage
from deepinfer.daemon.display import StartDisplay
from deepinfer.daemon.runtime_folder import RuntimeFolder
from deepinfer.daemon.supervisor import EngineProcess
from deepinfer.daemon.topology import two_processes
from deepinfer.stages.admission import AdmissionStage
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.messages import Drain, EngineFailed, Message, encode
from deepinfer.stages.model import load_tokenizer, resolve_model
from deepinfer.stages.protocol import PROTOCOL_VERSION, Limits
from deepinfer.stages.stage import Stage

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
CUT_SECONDS = 10.0
EXIT_OK, EXIT_ENGINE_FAILED, EXIT_CONFIG = 0, 1, 78


class Front:
    """`run` returns the exit code of `start`: 0 after a stop, 1 when the engine died, 78 for a bad setting.

    The first SIGTERM or SIGINT drains, the second one cuts.
    """

    def __init__(self, config: DaemonConfig, folder: RuntimeFolder, display: StartDisplay) -> None:
        self.config = config
        self.folder = folder
        self.display = display
        self.topology = two_processes(folder.path, config.endpoint)
        self.context = zmq.Context()
        self.board = StatusBoard({"pid": os.getpid(), "instance": secrets.token_hex(8), "model": config.model})
        self._stop_wishes = 0
        self._cut = False
        self._deadline: float | None = None

    def run(self) -> int:
        began = time.monotonic()
        engine: EngineProcess | None = None
        stages: list[Stage] = []
        self._outbox = self.context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.LINGER, 0)
        try:
            path = resolve_model(self.config.model)
            engine = EngineProcess(self.config.engine(), self.topology)
            self.board.info["engine_pid"] = engine.pid
            tokenizer = load_tokenizer(path)
            self.limits = Limits(vocab_size=tokenizer.vocab_size)
            stages = [self._admission(tokenizer), self._control()]
            for stage in stages:
                stage.start()
            self._outbox.connect(self.topology.admission)
            engine.send_vocabulary(tokenizer.vocab_size, tokenizer.eos_token_ids)
            self._install_signals()
            return self._watch(engine, began)
        finally:
            self._end(engine, stages)

    def _admission(self, tokenizer: Any) -> AdmissionStage:
        return AdmissionStage(
            self.context,
            self.topology.admission,
            self.topology.outboxes("decode"),
            self.topology.clients,
            tokenizer,
            self.config.model,
            self.limits,
            self.board,
            self.config.max_queue,
        )

    def _control(self) -> ControlStage:
        return ControlStage(self.context, "inproc://control-inbox", self.topology.control, self.board, self._wish_stop)

    # --- the watch --------------------------------------------------------------------------------------------

    def _watch(self, engine: EngineProcess, began: float) -> int:
        announced = False
        start_by = began + self.config.start_timeout_s
        while True:
            self.board.changed.wait(POLL_SECONDS)
            self.board.changed.clear()
            self._notice_death(engine)
            phase = self.board.phase
            if phase == "loading":
                self.display.progress(*self.board.progress)
                if time.monotonic() > start_by:
                    self.board.fail(f"the engine was not ready after {self.config.start_timeout_s} s")
            elif phase == "ready" and not announced:
                announced = True
                self.board.info["ready_seconds"] = round(time.monotonic() - began, 2)
                self._announce()
            elif phase == "stopped":
                return EXIT_OK
            elif phase == "failed":
                self.display.failed(self.board.error)
                return EXIT_CONFIG if self.board.config_error else EXIT_ENGINE_FAILED
            if self._stop_wishes and self._stop(engine):
                return EXIT_OK

    def _notice_death(self, engine: EngineProcess) -> None:
        death = engine.death()
        if death is None or self.board.phase in ("failed", "stopped"):
            return
        # Its last words may still be in admission's inbox, and they say more than an exit code.
        self.board.changed.wait(2 * POLL_SECONDS)
        if self.board.phase not in ("failed", "stopped"):
            self._tell_admission(EngineFailed(error=death))
            while self.board.phase != "failed":
                self.board.changed.wait(POLL_SECONDS)

    def _announce(self) -> None:
        connection = {
            "protocol": PROTOCOL_VERSION,
            "endpoint": self.board.info["endpoint"],
            "control_endpoint": self.topology.control,
            "instance": self.board.info["instance"],
            "pid": os.getpid(),
            "model": self.config.model,
            "limits": self.limits.to_dict(),
        }
        where = self.folder.publish(connection)
        self.display.ready(self.board.status(), where)

    # --- stopping ---------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._wish_stop(self._stop_wishes > 0))

    def _wish_stop(self, now: bool) -> None:
        """Called by signal handlers and by the control thread: notes the wish, the main loop acts on it."""
        self._stop_wishes += 1
        self._cut = self._cut or now
        self.board.changed.set()

    def _stop(self, engine: EngineProcess) -> bool:
        """One look at a stop under way; True when the daemon may end now."""
        now = time.monotonic()
        if self.board.phase == "loading":
            return True
        if self._deadline is None:
            self._deadline = now + self.config.drain_s
            self._tell_admission(Drain(now=self._cut))
            self.display.stopping(self._cut)
            self._told_cut = self._cut
        if not self._told_cut and (self._cut or now > self._deadline):
            self._tell_admission(Drain(now=True))
            self.display.stopping(True)
            self._told_cut = True
        if self._told_cut and now > self._deadline + CUT_SECONDS:
            logger.error("the engine did not stop within %.0f s and is killed", CUT_SECONDS)
            return True
        return False

    def _tell_admission(self, message: Message) -> None:
        self._outbox.send(encode(message))

    def _end(self, engine: EngineProcess | None, stages: list[Stage]) -> None:
        """Nothing is left behind: processes, threads, sockets, files."""
        if engine is not None:
            engine.end()
        for stage in stages:
            stage.stop(CUT_SECONDS)
        self._outbox.close()
        self.context.term()
        self.folder.release()


def runtime_path(folder: Path | None) -> Path:
    """The folder that was asked for, else the one that clients look in by themselves."""
    from deepinfer.clients.discovery import runtime_dir

    return folder if folder is not None else Path(runtime_dir())
