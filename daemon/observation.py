"""Everything by which the front is watched from outside: the registry, the publisher, the Prometheus port."""

from __future__ import annotations

import zmq

from deepinfer.daemon.config import DaemonConfig
from deepinfer.daemon.metrics import Metrics
from deepinfer.daemon.prometheus_port import PrometheusPort
from deepinfer.daemon.publisher import PublisherStage
from deepinfer.daemon.telemetry import PublishedTelemetry
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.curve import Curve


class Observation:
    """Owned by the front's main thread; `telemetry` is for every thread. Phases of `board` become events."""

    def __init__(self, config: DaemonConfig, board: StatusBoard) -> None:
        self._config = config
        self._board = board
        self._metrics = Metrics(board)
        self.telemetry = PublishedTelemetry(self._metrics)
        self._port: PrometheusPort | None = None
        board.on_phase = self._tell_phase

    def publisher(self, context: zmq.Context, address: str, curve: Curve | None) -> PublisherStage:
        """To be started before the other stages and stopped after them, so that it hears and tells of everything."""
        return PublisherStage(
            context,
            "inproc://publisher-inbox",
            address,
            self._board,
            self.telemetry,
            self._config.metrics_interval_ms / 1000,
            second_address=self._config.metrics_endpoint,
            curve=curve,
        )

    def open_port(self) -> None:
        """If one was asked for. Raises EndpointError."""
        if self._config.prometheus_port is not None:
            host, port = self._config.prometheus_host, self._config.prometheus_port
            self._port = PrometheusPort(self._metrics.registry, host, port)
            self._board.info["prometheus"] = self._port.url

    def close(self) -> None:
        if self._port is not None:
            self._port.close()

    def _tell_phase(self, phase: str) -> None:
        self.telemetry.event(phase, **({"error": self._board.error} if phase == "failed" else {}))
