"""What becomes of the engine, as admission hears it: ready, dead, followed by another one, drained, stopped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from deepinfer.stages import messages
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.client_streams import ClientStreams
from deepinfer.stages.engine_port import EngineAddresses, EnginePort
from deepinfer.stages.intake import Capacity
from deepinfer.stages.live_table import LiveTable
from deepinfer.stages.protocol import Generate, ProtocolError
from deepinfer.stages.stage import monotonic
from deepinfer.stages.telemetry import Telemetry

logger = logging.getLogger(__name__)


class EngineLife:
    """Owned by admission, used in its thread. Writes on the board what the engine is, and tells the streams of it.

    `supervised`: a new engine is started when this one dies, or `EngineDied` says that there will be none.
    """

    def __init__(
        self,
        engine: EnginePort,
        table: LiveTable,
        streams: ClientStreams,
        board: StatusBoard,
        telemetry: Telemetry,
        supervised: bool,
    ) -> None:
        self._engine = engine
        self._table = table
        self._streams = streams
        self._board = board
        self._telemetry = telemetry
        self._supervised = supervised
        self.capacity: Capacity | None = None
        """None until the first engine is ready, and when there will be none any more."""
        self._draining = False
        """No new requests are taken."""
        self._cut = False
        """Nor are live ones finished."""

    def check_ready(self, op: Generate) -> Capacity:
        """What a request may need. Raises ProtocolError `shutting_down` or `not_ready`. While another engine is
        started, requests are taken: they wait."""
        if self._draining:
            raise ProtocolError("shutting_down", "the daemon is stopping and takes no new requests", id=op.id)
        if self.capacity is None:
            raise ProtocolError("not_ready", f"the engine is {self._board.phase}", id=op.id)
        return self.capacity

    def ready(self, pid: int, summary: dict[str, Any], vocab_size: int) -> None:
        """`vocab_size`: ids that both the tokenizer and the model know."""
        self.capacity = Capacity(summary["context"], summary["longest_stored"], vocab_size)
        self._board.summary = summary
        self._board.ready_pid = pid
        self._board.set_phase("draining" if self._draining else "ready")
        self._engine.up = True
        self._engine.submit_waiting()
        if self._draining:
            self._engine.drain(self._cut)

    def on_progress(self, message: messages.LoadProgress) -> None:
        self._board.progress = (message.what, message.done, message.total)
        self._board.changed.set()

    def on_snapshot(self, message: messages.Snapshot) -> None:
        self._board.engine_says(message.stats)

    def on_heartbeat(self, message: messages.Heartbeat) -> None:
        self._board.heartbeat = (monotonic(), message.pulses)

    # --- death ------------------------------------------------------------------------------------------------

    def on_failed(self, message: messages.EngineFailed) -> None:
        """An engine that was ready once can be started again; why the first one did not start, the user must hear."""
        if self._supervised and self.capacity is not None:
            self._engine.last_words = message.error
        else:
            self._give_up(message.error, message.config_error)

    def on_died(self, message: messages.EngineDied) -> None:
        """Everyone goes on from where he was, as soon as there is an engine again."""
        self._engine.disconnect()
        error = self._engine.last_words or message.error
        self._telemetry.event("engine_died", error=error, deaths=self._board.engine_deaths + 1)
        self._board.engine_died(error)
        if self._cut:
            self._streams.fail_all(ProtocolError("shutting_down", "the daemon is stopping"))
        elif not message.admission:
            self._give_up(error)
        else:
            self._engine.connect(EngineAddresses(message.admission, message.decode))
            self._board.set_phase("restarting")
            self._convict(message.running)
            self._streams.bereave_all()

    def _convict(self, running: Sequence[int]) -> None:
        guilty = self._engine.convict(running)
        if guilty is not None:
            live, choice = guilty
            logger.error("request %d killed the engine twice, at token %d", choice.rid, len(choice.generated))
            self._board.advances += 1
            error = ProtocolError("engine_killer", "the engine died twice while it computed this request")
            self._streams.fail(live, error)

    def _give_up(self, error: str, config_error: bool = False) -> None:
        """There will be no engine any more."""
        self.capacity = None
        self._streams.fail_all(ProtocolError("engine_failed", "the engine died while it worked on this request"))
        self._board.fail(error, config_error)

    # --- the end ----------------------------------------------------------------------------------------------

    def on_drain(self, message: messages.Drain) -> None:
        self._draining = True
        self._cut = self._cut or message.now
        if self._board.phase == "ready":
            self._board.set_phase("draining")
        self._engine.drain(message.now)
        if self._cut and not self._engine.up:
            self._streams.fail_all(ProtocolError("shutting_down", "the daemon is stopping"))

    def on_stopped(self, _: messages.EngineStopped) -> None:
        self._board.set_phase("stopped")

    def stop_without_engine(self) -> None:
        """When draining finds no engine, nobody says `EngineStopped`: it is over when the last request is."""
        if self._draining and not self._engine.up and all(live.over for live in self._table.requests()):
            self._board.set_phase("stopped")
