"""The admission stage: the client socket, the operations that clients ask for, and who hears what an engine says.

Everything that can be wrong with a request is found here, before any work is done for it. From `accepted` on, admission
owes the client exactly one terminal event, whatever becomes of the engine: `client_streams` sees to that, over the
requests in `live_table`, and `engine_life` tells it what becomes of the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from deepinfer.stages import client_port, messages
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.client_port import Delivery
from deepinfer.stages.client_streams import RETRY_SECONDS, ClientStreams
from deepinfer.stages.curve import Curve
from deepinfer.stages.engine_life import EngineLife
from deepinfer.stages.engine_port import EngineAddresses, EnginePort
from deepinfer.stages.intake import Intake
from deepinfer.stages.live import Route
from deepinfer.stages.live_table import LiveTable
from deepinfer.stages.model import Tokenizer
from deepinfer.stages.peers import Peers
from deepinfer.stages.protocol import (
    Cancel,
    Detokenize,
    Generate,
    Limits,
    Metrics,
    Models,
    Ping,
    ProtocolError,
    RequestId,
    Status,
    Tokenize,
    decode_request,
    is_req,
)
from deepinfer.stages.protocol_events import encode_error, encode_reply
from deepinfer.stages.stage import Stage, monotonic
from deepinfer.stages.telemetry import Telemetry

logger = logging.getLogger(__name__)

CLIENT_MESSAGES_PER_TURN = 64
CLIENT_SECONDS_PER_TURN = 0.02
IDLE_MS = 200
GOODBYE_SECONDS = 0.3


class EndpointError(ValueError):
    """The client endpoint cannot be bound."""


class AdmissionStage(Stage):
    """Owns the sockets, the tokenizer and the live-request table, and by `ClientStreams` every open stream."""

    name = "admission"

    def __init__(
        self,
        context: zmq.Context,
        inbox: str,
        engine: EngineAddresses,
        clients: str,
        tokenizer: Tokenizer,
        model: str,
        limits: Limits,
        board: StatusBoard,
        telemetry: Telemetry,
        supervised: bool = False,
        curve: Curve | None = None,
        log_prompts: bool = False,
    ) -> None:
        """`supervised`: a new engine is started when this one dies, or `EngineDied` says that there will be none."""
        super().__init__(context, inbox, {})
        self._clients_address = clients
        self._curve = curve
        self._log_prompts = log_prompts
        self._intake = Intake(tokenizer, model)
        self._limits = msgspec.structs.replace(limits, vocab_size=tokenizer.vocab_size)
        self._board = board
        self._telemetry = telemetry
        self._next_rid = 1
        self.table = LiveTable()
        self._engine = EnginePort(self, self.table.by_choice)
        self._engine_addresses = engine
        self._streams = ClientStreams(self.table, self._engine, board, telemetry, self._send)
        self._life = EngineLife(self._engine, self.table, self._streams, board, telemetry, supervised)
        self._register_handlers()
        self._ops: dict[type, Callable[[Route, Any], None]] = {
            Generate: self._generate,
            Cancel: self._cancel,
            Tokenize: self._tokenize,
            Detokenize: self._detokenize,
            Status: lambda route, op: self._reply(route, "status", op.id, self._board.status()),
            Metrics: lambda route, op: self._reply(route, "metrics", op.id, self._telemetry.metrics()),
            Models: self._models,
            Ping: lambda route, op: self._reply(route, "ping", op.id, {"phase": self._board.phase}),
        }

    def _register_handlers(self) -> None:
        self.on(messages.Tokens, self._streams.on_tokens)
        self.on(messages.Finished, self._streams.on_finished)
        self.on(messages.Preempted, self._streams.on_preempted)
        self.on(messages.Resumed, self._streams.on_resumed)
        self.on(messages.Snapshot, self._life.on_snapshot)
        self.on(messages.Heartbeat, self._life.on_heartbeat)
        self.on(messages.LoadProgress, self._life.on_progress)
        self.on(messages.EngineReady, self._on_ready)
        self.on(messages.EngineFailed, self._life.on_failed)
        self.on(messages.EngineDied, self._life.on_died)
        self.on(messages.EngineStopped, self._life.on_stopped)
        self.on(messages.Drain, self._life.on_drain)
        self.on(messages.Reconfigure, self._on_reconfigure)

    def opened(self) -> None:
        self._engine.connect(self._engine_addresses)
        self._clients = self.new_socket(zmq.ROUTER, poll=True)
        client_port.configure(self._clients, self._limits.max_frame_bytes)
        self._peers = Peers(self._clients, self.new_socket(zmq.PAIR, poll=True))
        if self._curve is not None:
            self._curve.secure(self._clients)
        try:
            self._clients.bind(self._clients_address)
        except zmq.ZMQError as error:
            raise EndpointError(f"endpoint: cannot listen on {self._clients_address}: {error.strerror}") from error
        self._board.info["endpoint"] = self._clients.getsockopt_string(zmq.LAST_ENDPOINT)

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        self._board.fail(f"the admission stage died: {error!r}")

    def closing(self) -> None:
        """Nobody is left without a last event. A client with IMMEDIATE set loses what it has not read when the
        connection breaks, so it gets a moment to read it."""
        self._streams.fail_all(ProtocolError("shutting_down", "the daemon has stopped"))
        if not self._clients_address.startswith("inproc://"):
            time.sleep(GOODBYE_SECONDS)
        self._peers.close()

    # --- limits -----------------------------------------------------------------------------------------------

    def _on_ready(self, message: messages.EngineReady) -> None:
        """Ids that the tokenizer knows and the model has no row for are refused, wherever they come from."""
        vocab_size = min(self._limits.vocab_size, message.summary["vocab_size"])
        self._limits = msgspec.structs.replace(self._limits, vocab_size=vocab_size)
        self._board.limits = self._limits.to_dict()
        self._life.ready(message.pid, message.summary, vocab_size)

    def _on_reconfigure(self, message: messages.Reconfigure) -> None:
        """The size of the vocabulary is the model's; that of a frame is the socket's, which is bound."""
        kept = {name: getattr(self._limits, name) for name in ("vocab_size", "max_frame_bytes")}
        self._limits = Limits(**{**message.limits, **kept})
        self._log_prompts = message.log_prompts
        if self._life.capacity is not None:
            self._board.limits = self._limits.to_dict()
        self._board.changed.set()

    # --- clients ----------------------------------------------------------------------------------------------

    def on_socket(self, socket: zmq.Socket) -> None:
        """Stops early after a request that took long (a huge prompt to tokenise): streams come first."""
        if socket is not self._clients:  # Somebody came or left: `work` looks who.
            return
        until = monotonic() + CLIENT_SECONDS_PER_TURN
        for identity, *frames in client_port.receive(socket, CLIENT_MESSAGES_PER_TURN, self._peers):
            self.progress += 1
            route = Route(identity, is_req(frames))
            try:
                self._handle(route, frames)
            except ProtocolError as error:
                self._telemetry.refused(error.code)
                self._answer(route, encode_error(error))
            if monotonic() > until:
                return

    def _handle(self, route: Route, frames: list[bytes]) -> None:
        if route.identity[:1] != b"\0":
            raise ProtocolError(
                "malformed",
                "a client must not choose its socket's identity: whoever chose it again would get its answers",
                allowed="no ROUTING_ID (IDENTITY) on the client's socket",
            )
        op = decode_request(frames, self._limits)
        try:
            self._ops[type(op)](route, op)
        except (ProtocolError, zmq.ZMQError):
            raise
        except Exception as error:
            # A chat template or a tokenizer is the checkpoint's code and data: what it does wrong costs one request.
            logger.exception("a fault while admitting a request")
            raise ProtocolError("internal", f"{type(error).__name__}: {error}", id=op.id) from error

    def _reply(self, route: Route, op: str, id: RequestId | None, data: Mapping[str, Any]) -> None:
        self._answer(route, encode_reply(op, id, data))

    def _answer(self, route: Route, payload: bytes) -> None:
        """One-answer calls keep nothing for a client that does not read: it can ask again."""
        if self._send(route.frames(payload)) is Delivery.GONE:
            self._streams.client_gone(route.identity)

    def _send(self, frames: list[bytes]) -> Delivery:
        return client_port.send(self._clients, frames)

    # --- operations -------------------------------------------------------------------------------------------

    def _models(self, route: Route, op: Models) -> None:
        entry = {"id": self._intake.model, "ready": self._engine.up}
        if self._life.capacity is not None:
            entry["context"] = self._life.capacity.context
        self._reply(route, "models", op.id, {"models": [entry]})

    def _tokenize(self, route: Route, op: Tokenize) -> None:
        ids = self._intake.encode(op.id, op.text, op.messages, op.add_special_tokens)
        self._reply(route, "tokenize", op.id, {"ids": ids, "count": len(ids)})

    def _detokenize(self, route: Route, op: Detokenize) -> None:
        text = self._intake.tokenizer.decode(op.ids.tolist(), op.skip_special_tokens)
        self._reply(route, "detokenize", op.id, {"text": text})

    def _cancel(self, route: Route, op: Cancel) -> None:
        """Legal at any time and any number of times. The stream answers with its terminal event; the reply says whether
        there was a stream."""
        live = self.table.stream(route.identity, op.id)
        self._reply(route, "cancel", op.id, {"found": live is not None})
        if live is not None and live in self.table:  # Its client may have been found gone.
            self._streams.end_early(live, "cancelled")

    def _generate(self, route: Route, op: Generate) -> None:
        """What can be known without a look at the prompt comes first."""
        capacity = self._life.check_ready(op)
        self.table.check_id(route.identity, op)
        self._intake.check_model(op)
        self.table.check_room(route.identity, op, self._limits)
        live = self._intake.live_request(self._next_rid, route, op, capacity)
        self._next_rid += len(live.choices)
        self._streams.open(live, op.deadline_ms)
        if self._log_prompts:
            prompt = op.prompt if op.prompt is not None else op.messages or op.prompt_ids
            logger.info("prompt of request %d: %r", live.rid, prompt)

    # --- turns ------------------------------------------------------------------------------------------------

    def work(self) -> bool:
        for identity in self._peers.left():
            self._streams.client_gone(identity)
        now = monotonic()
        self._board.turns += 1
        self._streams.retry(now)
        for live in self.table.overdue(now):
            self._streams.end_early(live, "deadline_exceeded")
        self._board.front = {"live": len(self.table), "blocked": self._streams.blocked}
        self._life.stop_without_engine()
        return False

    def poll_timeout_ms(self) -> int:
        if self._streams.blocked:
            return int(RETRY_SECONDS * 1000)
        deadline = self.table.seconds_to_deadline()
        return IDLE_MS if deadline is None else max(0, min(IDLE_MS, int(deadline * 1000) + 1))
