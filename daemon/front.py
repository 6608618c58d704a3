"""The front process: admission, control, and the life of the engine process. It never touches a tensor."""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq

from deepinfer.daemon.config import DaemonConfig
from deepinfer.daemon.control import ControlStage
from deepinfer.daemon.display import StartDisplay
from deepinfer.daemon.gate import Gate, key_store
from deepinfer.daemon.metrics import Metrics
from deepinfer.daemon.prometheus_port import PrometheusPort
from deepinfer.daemon.publisher import PublisherStage
from deepinfer.daemon.runtime_folder import AlreadyRunning, FileLock, RuntimeFolder
from deepinfer.daemon.supervisor import Supervisor
from deepinfer.daemon.telemetry import PublishedTelemetry
from deepinfer.daemon.topology import Topology
from deepinfer.stages.admission import AdmissionStage
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.curve import Curve
from deepinfer.stages.engine_port import EngineAddresses
from deepinfer.stages.messages import Drain, Message, encode
from deepinfer.stages.model import load_tokenizer, resolve_model
from deepinfer.stages.protocol import PROTOCOL_VERSION
from deepinfer.stages.stage import Stage

POLL_SECONDS = 0.1
CUT_SECONDS = 10.0
EXIT_OK, EXIT_ENGINE_FAILED, EXIT_CONFIG = 0, 1, 78


class Front:
    """`run` returns the exit code of `start`: 0 after a stop, 1 when no engine could be kept alive, 78 for a bad
    setting.

    The first SIGTERM or SIGINT drains, the second one cuts.
    """

    def __init__(
        self,
        config: DaemonConfig,
        folder: RuntimeFolder,
        topology: Topology,
        display: StartDisplay,
        curve: Curve | None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.display = display
        self.topology = topology
        self.context = zmq.Context()
        self.board = StatusBoard({"pid": os.getpid(), "instance": secrets.token_hex(8), "model": config.model})
        self.metrics = Metrics(self.board)
        self.telemetry = PublishedTelemetry(self.metrics)
        self.board.on_phase = self._tell_phase
        self._prometheus: PrometheusPort | None = None
        self._stop_wishes = 0
        self._cut = False
        self._endpoint_lock = self._lock_endpoint()
        self._gate = None if curve is None else Gate(self.context, curve, key_store(config.keys_dir))
        self._told_cut = False
        self._deadline: float | None = None

    def _lock_endpoint(self) -> FileLock | None:
        """An ipc endpoint outside the runtime folder has a lock of its own: a second bind would steal its clients."""
        endpoint = self.config.endpoint or ""
        if not endpoint.startswith("ipc://"):
            return None
        lock = FileLock(Path(endpoint.removeprefix("ipc://") + ".lock"))
        if not lock.acquire():
            raise AlreadyRunning(f"a daemon is already listening on {endpoint}")
        return lock

    def run(self) -> int:
        """Raises ModelError, EndpointError or ConfigError for what the user can mend."""
        began = time.monotonic()
        supervisor: Supervisor | None = None
        stages: list[Stage] = []
        self._install_signals()
        self._outbox = self.context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.LINGER, 0)
        try:
            path = resolve_model(self.config.model)
            if self._stop_wishes:
                return EXIT_OK
            supervisor = Supervisor(self.config, self.folder.path, self.topology, self.board, self._tell_admission)
            tokenizer = load_tokenizer(path)
            self._open_prometheus_port()
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
            self.telemetry,
            supervised=True,
            curve=None if self._gate is None else self._gate.curve,
        )

    def _publisher(self) -> PublisherStage:
        """Started first and stopped last, so that it hears and tells of everything."""
        return PublisherStage(
            self.context,
            "inproc://publisher-inbox",
            self.topology.metrics,
            self.board,
            self.telemetry,
            self.config.metrics_interval_ms / 1000,
        )

    def _open_prometheus_port(self) -> None:
        if self.config.prometheus_port is not None:
            self._prometheus = PrometheusPort(
                self.metrics.registry, self.config.prometheus_host, self.config.prometheus_port
            )
            self.board.info["prometheus"] = self._prometheus.url

    def _tell_phase(self, phase: str) -> None:
        self.telemetry.event(phase, **({"error": self.board.error} if phase == "failed" else {}))

    def _control(self) -> ControlStage:
        return ControlStage(
            self.context,
            "inproc://control-inbox",
            self.topology.control,
            self.board,
            self.telemetry,
            self._on_stop_request,
            self.config.drain_s,
            self.config.control_endpoint,
            None if self._gate is None else self._gate.curve,
        )

    # --- the watch --------------------------------------------------------------------------------------------

    def _watch(self, supervisor: Supervisor, began: float) -> int:
        announced = False
        while True:
            self.board.changed.wait(POLL_SECONDS)
            self.board.changed.clear()
            supervisor.cut = self._told_cut
            supervisor.look()
            phase = self.board.phase
            if phase == "loading":
                self.display.progress(*self.board.progress)
            elif phase == "ready" and not announced:
                announced = True
                self.board.info["ready_seconds"] = round(time.monotonic() - began, 2)
                self._announce()
            elif phase == "stopped":
                return EXIT_OK
            elif phase == "failed":
                self.display.failed(self.board.error)
                return EXIT_CONFIG if self.board.config_error else EXIT_ENGINE_FAILED
            if self._stop_wishes:
                code = self._stop()
                if code is not None:
                    return code

    def _announce(self) -> None:
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
        where = self.folder.publish(connection)
        self.display.ready(self.board.status(), where)

    # --- stopping ---------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        """A handler only notes the wish, and the watch looks ten times a second: it may run anywhere, even inside the
        lock of an Event."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        self._cut = self._cut or self._stop_wishes > 0
        self._stop_wishes += 1

    def _on_stop_request(self, now: bool) -> None:
        """Called by the control thread."""
        self._cut = self._cut or now
        self._stop_wishes += 1
        self.board.changed.set()

    def _stop(self) -> int | None:
        """One look at a stop under way; the exit code when the daemon may end now."""
        now = time.monotonic()
        if self.board.phase == "loading":
            return EXIT_OK
        if self._deadline is None:
            self._deadline = now + self.config.drain_s
            self._tell_admission(Drain(now=self._cut))
            self.display.stopping(self._cut)
            self._told_cut = self._cut
        if not self._told_cut and (self._cut or now > self._deadline):
            self._deadline = now
            self._tell_admission(Drain(now=True))
            self.display.stopping(True)
            self._told_cut = True
        if self._told_cut and now > self._deadline + CUT_SECONDS:
            self.display.failed(f"the engine did not stop within {CUT_SECONDS:.0f} s and is killed")
            return EXIT_ENGINE_FAILED
        return None

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
            if self._prometheus is not None:
                steps.callback(self._prometheus.close)
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
