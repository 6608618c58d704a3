"""The front process: admission, control, and the life of the engine process. It never touches a tensor."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import zmq

from deepinfer.daemon.config import ConfigError, DaemonConfig
from deepinfer.daemon.control import ControlRequest, ControlStage
from deepinfer.daemon.display import StartDisplay
from deepinfer.daemon.garbage import spare_what_stays
from deepinfer.daemon.gate import Gate, key_store
from deepinfer.daemon.heap import Heap, resident_bytes
from deepinfer.daemon.notify import ServiceManager
from deepinfer.daemon.observation import Observation
from deepinfer.daemon.reload import Reloader
from deepinfer.daemon.runtime_folder import AlreadyRunning, FileLock, RuntimeFolder
from deepinfer.daemon.stacks import all_stacks, dump_on_signal
from deepinfer.daemon.stopping import CUT_SECONDS, EXIT_CONFIG, EXIT_ENGINE_FAILED, EXIT_OK, Stopping
from deepinfer.daemon.supervisor import Supervisor
from deepinfer.daemon.topology import Topology
from deepinfer.stages.admission import AdmissionStage
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.curve import Curve
from deepinfer.stages.engine_port import EngineAddresses
from deepinfer.stages.messages import Message, Reconfigure, encode
from deepinfer.stages.model import load_tokenizer, resolve_model
from deepinfer.stages.protocol import PROTOCOL_VERSION
from deepinfer.stages.stage import Stage

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
SWITCH_SECONDS = 0.001
"""Between the threads of this process. An answer on the control socket takes the interpreter lock several times, and
may wait so long for a busy admission each time; Python's own value is 5 ms."""


class Front:
    """`run` returns the exit code of `start`: 0 after a stop, 1 when no engine could be kept alive, 78 for a bad
    setting.

    The first SIGTERM or SIGINT drains, the second one cuts; SIGHUP reloads; SIGUSR1 writes all stacks to the log.
    """

    def __init__(
        self,
        config: DaemonConfig,
        folder: RuntimeFolder,
        topology: Topology,
        display: StartDisplay,
        curve: Curve | None,
        read_config: Callable[[], DaemonConfig],
    ) -> None:
        """`read_config` looks at the sources of the configuration again."""
        self.config = config
        self.folder = folder
        self.display = display
        self.topology = topology
        self.context = zmq.Context()
        self.board = StatusBoard({"pid": os.getpid(), "instance": secrets.token_hex(8), "model": config.model})
        self.observation = Observation(config, self.board)
        self.manager = ServiceManager()
        self.stopping = Stopping(config.drain_s, self._tell_admission, self.board, display, self.manager)
        self._endpoint_lock: FileLock | None = None
        self._curve = curve
        self._gate = None if curve is None else Gate(self.context, curve, key_store(config.keys_dir))
        self._reloader = Reloader(config, read_config, self._gate, self._apply)
        self._reload_wished = False
        self._errands: SimpleQueue[Message] = SimpleQueue()
        """From other threads to admission; the main thread's socket is its own."""
        self._announced: dict[str, Any] | None = None
        self._heap: Heap | None = None
        """From when it is ready on: what it has then is what it needs."""

    def _lock_endpoint(self) -> FileLock | None:
        """An ipc endpoint outside the runtime folder has a lock of its own: a second bind would steal its clients."""
        endpoint = self.config.endpoint or ""
        if not endpoint.startswith("ipc://"):
            return None
        lock = FileLock(Path(endpoint.removeprefix("ipc://") + ".lock"), "endpoint")
        if not lock.acquire():
            raise AlreadyRunning(f"a daemon is already listening on {endpoint}")
        return lock

    def run(self) -> int:
        """Raises ModelError, EndpointError, ConfigError, FolderError or AlreadyRunning for what the user can mend."""
        began = time.monotonic()
        sys.setswitchinterval(SWITCH_SECONDS)
        supervisor: Supervisor | None = None
        stages: list[Stage] = []
        self._install_signals()
        self._outbox = self.context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.LINGER, 0)
        try:
            self._endpoint_lock = self._lock_endpoint()
            path = resolve_model(self.config.model)
            if self.stopping.wished:
                return EXIT_OK
            supervisor = Supervisor(self.config, self.folder.path, self.topology, self.board, self._tell_admission)
            tokenizer = load_tokenizer(path)
            self.observation.open_port()
            stages = [self._publisher(), self._admission(tokenizer), self._control()]
            for stage in stages:
                stage.start()
            self._outbox.connect(self.topology.front)
            supervisor.introduce(tokenizer.vocab_size, tokenizer.eos_token_ids)
            return self._watch(supervisor, began)
        finally:
            self._end(supervisor, stages)

    def _admission(self, tokenizer: Any) -> AdmissionStage:
        return AdmissionStage(
            self.context,
            self.topology.front,
            EngineAddresses(self.topology.admission, self.topology.decode),
            self.topology.clients,
            tokenizer,
            self.config.model,
            self.config.limits(),
            self.board,
            self.observation.telemetry,
            supervised=True,
            curve=self._curve,
            log_prompts=self.config.log_prompts,
        )

    def _publisher(self) -> Stage:
        return self.observation.publisher(self.context, self.topology.metrics, self._curve)

    def _control(self) -> ControlStage:
        return ControlStage(
            self.context,
            "inproc://control-inbox",
            self.topology.control,
            self.board,
            {
                "metrics": lambda _: self.observation.telemetry.metrics(),
                "stop": self._stop,
                "drain": self._drain,
                "reload": lambda _: self._reloader.reload(),
                "dump": self._dump,
            },
            self.config.control_endpoint,
            self._curve,
        )

    # --- the watch --------------------------------------------------------------------------------------------

    def _watch(self, supervisor: Supervisor, began: float) -> int:
        while True:
            self.board.changed.wait(POLL_SECONDS)
            self.board.changed.clear()
            supervisor.cut = self.stopping.cut
            supervisor.set_log_level(self.config.log_level)
            supervisor.look()
            self._run_errands()
            phase = self.board.phase
            if phase == "loading":
                self.display.progress(*self.board.progress)
            elif phase == "stopped":
                return EXIT_OK
            elif phase == "failed":
                self.display.failed(self.board.error)
                return EXIT_CONFIG if self.board.config_error else EXIT_ENGINE_FAILED
            else:
                self._keep_announced(began)
            if self.stopping.wished:
                code = self.stopping.look()
                if code is not None:
                    return code

    def _keep_announced(self, began: float) -> None:
        """The connection file says what counts now. The service manager hears that we live, unless something hangs."""
        if self._announced is None:
            self.board.info["ready_seconds"] = round(time.monotonic() - began, 2)
            self._heap = Heap(resident_bytes(), time.monotonic())
            spare_what_stays()
        connection = self._connection()
        if connection != self._announced:
            where = self.folder.publish(connection)
            if self._announced is None:
                self.display.ready(self.board.status(), where)
                self.manager.ready(f"serving {self.config.model} at {connection['endpoint']}")
            self._announced = connection
        if self._heap is not None:
            self._heap.look(time.monotonic())
        if not self.board.hung:
            self.manager.alive()

    def _run_errands(self) -> None:
        while not self._errands.empty():
            self._tell_admission(self._errands.get())
        if self._reload_wished and self._announced is not None:
            self._reload_wished = False
            self.manager.reloading()
            try:
                self._reloader.reload()
            except ConfigError as error:
                logger.error("not reloaded: %s", error)
            self.manager.ready("reloaded")

    def _connection(self) -> dict[str, Any]:
        connection = {
            "protocol": PROTOCOL_VERSION,
            "endpoint": self.board.info["endpoint"],
            "control_endpoint": self.topology.control,
            "metrics_endpoint": self.topology.metrics,
            "instance": self.board.info["instance"],
            "pid": os.getpid(),
            "model": self.config.model,
            "limits": self.board.limits,
        }
        if self._gate is not None:
            connection["curve"] = self._gate.connection()
        return connection

    # --- what operators ask for -------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stopping.on_signal)
        # On a terminal it says that the terminal has gone; elsewhere it is what a service manager sends for a reload.
        signal.signal(signal.SIGHUP, self.stopping.on_signal if sys.stderr.isatty() else self._on_hangup)
        dump_on_signal()

    def _on_hangup(self, *_: Any) -> None:
        self._reload_wished = True

    def _stop(self, request: ControlRequest) -> dict[str, Any]:
        self.stopping.wish(now=request.now)
        return self._stopping_report(request.now)

    def _drain(self, request: ControlRequest) -> dict[str, Any]:
        self.stopping.wish(seconds=request.seconds)
        return self._stopping_report(False)

    def _stopping_report(self, now: bool) -> dict[str, Any]:
        return {"stopping": True, "now": now, "pid": os.getpid(), "drain_s": self.stopping.patience}

    def _dump(self, _: ControlRequest) -> dict[str, Any]:
        """Our stacks in the answer; the engine writes its own to the log, whatever state it is in. One that is not
        ready yet might die of the signal instead."""
        engine = self.board.ready_pid
        with suppress(ProcessLookupError):
            if engine and engine == self.board.info.get("engine_pid"):
                os.kill(engine, signal.SIGUSR1)
        return {"front": all_stacks(), "engine_pid": engine}

    def _apply(self, config: DaemonConfig) -> None:
        self.config = config
        self.stopping.drain_s = config.drain_s
        self._errands.put(Reconfigure(limits=config.limits().to_dict(), log_prompts=config.log_prompts))
        self.board.changed.set()

    def _tell_admission(self, message: Message) -> None:
        self._outbox.send(encode(message))

    def _end(self, supervisor: Supervisor | None, stages: list[Stage]) -> None:
        """Nothing is left behind: processes, threads, sockets, files. Each step is taken whatever the others did."""
        with ExitStack() as steps:
            steps.callback(self.folder.release)
            if self._endpoint_lock is not None:
                steps.callback(self._endpoint_lock.release)
            steps.callback(self.context.term)
            steps.callback(self._outbox.close)
            steps.callback(self.observation.close)
            if self._gate is not None:
                steps.callback(self._gate.close)
            for stage in stages:
                steps.callback(stage.stop, CUT_SECONDS)
            if supervisor is not None:
                steps.callback(supervisor.end)


def runtime_path(folder: Path | None) -> Path:
    """The folder that was asked for, else the one that clients look in by themselves."""
    from deepinfer.clients.discovery import runtime_dir

    return folder if folder is not None else Path(runtime_dir())
