"""The admission stage: client sockets, validation, tokenising, and the text side of every live request.

Everything that can be wrong with a request is found here, before any work is done for it. From `accepted` on, admission
owes the client exactly one terminal event, whatever becomes of the engine.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from deepinfer.stages import client_port, messages
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.choice import Choice
from deepinfer.stages.client_port import Delivery
from deepinfer.stages.curve import Curve
from deepinfer.stages.engine_port import EngineAddresses, EnginePort
from deepinfer.stages.intake import Capacity, Intake
from deepinfer.stages.live import LiveRequest, Route
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
from deepinfer.stages.turns import Turns

logger = logging.getLogger(__name__)

CLIENT_MESSAGES_PER_TURN = 64
CLIENT_SECONDS_PER_TURN = 0.02
RETRY_BLOCKED_MS = 5
IDLE_MS = 200
MAX_PENDING_IDS = 8192
"""Tokens that wait for one client that does not read, over all its streams."""
GOODBYE_SECONDS = 0.3
STARTED = -1
"""The turn of a request that waits no more."""
ENDS_REMEMBERED = 32
RETRY_AFTER_S = 1.0
"""What is said when the queue is full and nothing has ended yet."""
GIVE_UP_SECONDS = 30.0
"""A client that has not taken its last events for this long is treated as gone."""


class EndpointError(ValueError):
    """The client endpoint cannot be bound."""


class AdmissionStage(Stage):
    """Owns the client socket, the tokenizer and the live-request table."""

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
        self._live: dict[int, LiveRequest] = {}
        self._by_choice: dict[int, LiveRequest] = {}
        """By the ids that the engine knows."""
        self._engine = EnginePort(self, self._by_choice)
        self._engine_addresses = engine
        self._supervised = supervised
        self._clients_address = clients
        self._curve = curve
        self._log_prompts = log_prompts
        self._intake = Intake(tokenizer, model)
        self._model = model
        self._limits = msgspec.structs.replace(limits, vocab_size=tokenizer.vocab_size)
        self._board = board
        self._telemetry = telemetry
        self._ends: deque[float] = deque(maxlen=ENDS_REMEMBERED)
        """When the last requests ended."""
        self._capacity: Capacity | None = None
        self._draining = False
        self._cut = False
        self._next_rid = 1
        self._by_stream: dict[tuple[bytes, RequestId], int] = {}
        self._turns = Turns()
        self._streams: Counter[bytes] = Counter()
        """Live streams by connection."""
        self._blocked: dict[int, float] = {}
        """Requests whose client does not read now, and since when."""
        self._deadlines: list[tuple[float, int]] = []
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
        self.on(messages.Tokens, self._on_tokens)
        self.on(messages.Finished, self._on_finished)
        self.on(messages.Preempted, self._on_preempted)
        self.on(messages.Resumed, self._on_resumed)
        self.on(messages.Snapshot, self._on_snapshot)
        self.on(messages.Heartbeat, self._on_heartbeat)
        self.on(messages.LoadProgress, self._on_progress)
        self.on(messages.EngineReady, self._on_ready)
        self.on(messages.EngineFailed, self._on_engine_failed)
        self.on(messages.EngineDied, self._on_engine_died)
        self.on(messages.EngineStopped, self._on_engine_stopped)
        self.on(messages.Drain, self._on_drain)
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
        self._end_all(ProtocolError("shutting_down", "the daemon has stopped"))
        if not self._clients_address.startswith("inproc://"):
            time.sleep(GOODBYE_SECONDS)
        self._peers.close()

    # --- the engine -------------------------------------------------------------------------------------------

    def _on_progress(self, message: messages.LoadProgress) -> None:
        self._board.progress = (message.what, message.done, message.total)
        self._board.changed.set()

    def _on_ready(self, message: messages.EngineReady) -> None:
        """Ids that the tokenizer knows and the model has no row for are refused, wherever they come from."""
        summary = message.summary
        vocab_size = min(self._limits.vocab_size, summary["vocab_size"])
        self._limits = msgspec.structs.replace(self._limits, vocab_size=vocab_size)
        self._capacity = Capacity(summary["context"], summary["num_blocks"], summary["block_size"], vocab_size)
        self._board.summary = summary
        self._board.ready_pid = message.pid
        self._board.limits = self._limits.to_dict()
        self._board.set_phase("draining" if self._draining else "ready")
        self._engine.up = True
        self._engine.submit_waiting()
        if self._draining:
            self._engine.drain(self._cut)

    def _on_snapshot(self, message: messages.Snapshot) -> None:
        self._board.engine_says(message.stats)

    def _on_heartbeat(self, message: messages.Heartbeat) -> None:
        self._board.heartbeat = (monotonic(), message.pulses)

    def _on_engine_failed(self, message: messages.EngineFailed) -> None:
        """An engine that was ready once can be started again; why the first one did not start, the user must hear."""
        if self._supervised and self._capacity is not None:
            self._engine.last_words = message.error
        else:
            self._give_up(message.error, message.config_error)

    def _on_engine_died(self, message: messages.EngineDied) -> None:
        """Everyone goes on from where he was, as soon as there is an engine again."""
        self._engine.disconnect()
        error = self._engine.last_words or message.error
        self._telemetry.event("engine_died", error=error, deaths=self._board.engine_deaths + 1)
        self._board.engine_died(error)
        if self._cut:
            self._end_all(ProtocolError("shutting_down", "the daemon is stopping"))
        elif not message.admission:
            self._give_up(error)
        else:
            self._engine.connect(EngineAddresses(message.admission, message.decode))
            self._board.set_phase("restarting")
            self._convict(message.running)
            for live in list(self._live.values()):
                self._bereave(live)

    def _convict(self, running: Sequence[int]) -> None:
        guilty = self._engine.convict(running)
        if guilty is not None:
            live, choice = guilty
            logger.error("request %d killed the engine twice, at token %d", choice.rid, len(choice.generated))
            self._board.advances += 1
            live.fail(ProtocolError("engine_killer", "the engine died twice while it computed this request"))
            self._flush(live)

    def _give_up(self, error: str, config_error: bool = False) -> None:
        """There will be no engine any more."""
        self._capacity = None
        self._end_all(ProtocolError("engine_failed", "the engine died while it worked on this request"))
        self._board.fail(error, config_error)

    def _bereave(self, live: LiveRequest) -> None:
        """The engine that had it is dead."""
        if live.over:
            return
        for choice in [choice for choice in live.unfinished if choice.submitted]:
            choice.submitted = False
            if choice.cancelled:
                self._end_here(live, choice, choice.cancelled)
            else:
                self._preempt(live, choice, "engine_restart")
        self._flush(live)

    def _end_all(self, error: ProtocolError) -> None:
        for live in list(self._live.values()):
            live.fail(error)
            self._flush(live)

    def _end_early(self, live: LiveRequest, reason: str) -> None:
        """The engine will end it; if no engine has it, it ends here."""
        for choice in self._engine.cancel(live.unfinished, reason):
            self._end_here(live, choice, reason)
        self._flush(live)

    def _end_here(self, live: LiveRequest, choice: Choice, reason: str) -> None:
        live.finish(messages.Finished(rid=choice.rid, reason=reason, timings=choice.clock.timings()))

    def _on_engine_stopped(self, _: messages.EngineStopped) -> None:
        self._board.set_phase("stopped")

    def _on_drain(self, message: messages.Drain) -> None:
        self._draining = True
        self._cut = self._cut or message.now
        if self._board.phase == "ready":
            self._board.set_phase("draining")
        self._engine.drain(message.now)
        if self._cut and not self._engine.up:
            self._end_all(ProtocolError("shutting_down", "the daemon is stopping"))

    def _on_reconfigure(self, message: messages.Reconfigure) -> None:
        """The size of the vocabulary is the model's; that of a frame is the socket's, which is bound."""
        kept = {name: getattr(self._limits, name) for name in ("vocab_size", "max_frame_bytes")}
        self._limits = Limits(**{**message.limits, **kept})
        self._log_prompts = message.log_prompts
        if self._capacity is not None:
            self._board.limits = self._limits.to_dict()
        self._board.changed.set()

    def _on_tokens(self, message: messages.Tokens) -> None:
        self._board.advances += len(message.items)
        for item in message.items:
            live = self._by_choice.get(item.rid)
            if live is None:
                continue
            if live.hears(item.rid):
                self._take_token(live, item)
            self._engine.moved(item.rid)
            self._flush(live)

    def _leave_turn(self, live: LiveRequest, started: bool) -> None:
        """Once for every request. One that was started goes before all that wait, should its engine die."""
        if live.waits:
            live.waits, live.turn = False, STARTED
            self._turns.leave(live.priority, live.route.identity, started)

    def _take_token(self, live: LiveRequest, item: messages.TokenItem) -> None:
        self._leave_turn(live, started=True)
        choice = live.choice(item.rid)
        before = choice.clock.last_token
        live.token(item)
        now = choice.clock.last_token or monotonic()
        if before is not None:
            self._telemetry.next_token(now - before)
        elif choice is live.choices[0]:
            self._telemetry.first_token(now - choice.clock.submitted, live.prompt_tokens)
        if choice.stopped:
            self._engine.cancel([choice], "stop")

    def _on_preempted(self, message: messages.Preempted) -> None:
        live = self._by_choice.get(message.rid)
        if live is not None:
            self._preempt(live, live.choice(message.rid))
            self._flush(live)

    def _preempt(self, live: LiveRequest, choice: Choice, reason: str | None = None) -> None:
        if not choice.clock.parked:
            self._telemetry.event("preempted", request=choice.rid, id=live.client_id, reason=reason)
        live.preempted(choice, reason)

    def _on_resumed(self, message: messages.Resumed) -> None:
        live = self._by_choice.get(message.rid)
        if live is not None:
            self._telemetry.event("resumed", request=message.rid, id=live.client_id)
            live.resumed(live.choice(message.rid))
            self._flush(live)

    def _on_finished(self, message: messages.Finished) -> None:
        live = self._by_choice.get(message.rid)
        if live is not None:
            live.finish(message)
            self._engine.moved(message.rid)
            if live.over:
                self._engine.cancel(live.unfinished, "cancelled")
            self._flush(live)

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
        if client_port.send(self._clients, route.frames(payload)) is Delivery.GONE:
            self._client_gone(route.identity)

    def _models(self, route: Route, op: Models) -> None:
        entry = {"id": self._model, "ready": self._engine.up}
        if self._capacity is not None:
            entry["context"] = self._capacity.context
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
        rid = self._by_stream.get((route.identity, op.id))
        self._reply(route, "cancel", op.id, {"found": rid is not None})
        if rid in self._live:
            self._end_early(self._live[rid], "cancelled")

    # --- generate ---------------------------------------------------------------------------------------------

    def _generate(self, route: Route, op: Generate) -> None:
        capacity = self._check_open(route, op)
        live = self._intake.live_request(self._next_rid, route, op, capacity)
        self._next_rid += len(live.choices)
        self._live[live.rid] = live
        self._by_choice |= dict.fromkeys((choice.rid for choice in live.choices), live)
        self._by_stream[(route.identity, op.id)] = live.rid
        self._streams[route.identity] += 1
        if op.deadline_ms is not None:
            heapq.heappush(self._deadlines, (monotonic() + op.deadline_ms / 1000, live.rid))
            self._prune_deadlines()
        live.turn, live.waits = self._turns.take(live.priority, route.identity), True
        self._engine.submit(live)
        live.accept()
        self._flush(live)
        if self._log_prompts:
            prompt = op.prompt if op.prompt is not None else op.messages or op.prompt_ids
            logger.info("prompt of request %d: %r", live.rid, prompt)

    def _check_open(self, route: Route, op: Generate) -> Capacity:
        """Refuse what need not be looked at closer."""
        if self._draining:
            raise ProtocolError("shutting_down", "the daemon is stopping and takes no new requests", id=op.id)
        if self._capacity is None:
            raise ProtocolError("not_ready", f"the engine is {self._board.phase}", id=op.id)
        if (route.identity, op.id) in self._by_stream:
            message = f"id: a stream with the id {op.id!r} is live on this connection"
            raise ProtocolError("duplicate_id", message, field="id", value=repr(op.id), id=op.id)
        if op.model is not None and op.model != self._model:
            raise ProtocolError(
                "unknown_model",
                f"model: {op.model!r} is not served here; this daemon serves {self._model!r}",
                field="model",
                value=op.model,
                allowed=self._model,
                id=op.id,
            )
        self._check_room(route, op)
        return self._capacity

    def _check_room(self, route: Route, op: Generate) -> None:
        """Every choice takes a place in the queue. `retry_after_s`: how long it took lately until a request ended."""
        own = self._streams[route.identity]
        for live, more, limit, whose in (
            (len(self._by_choice), op.n, self._limits.max_queue, "max_queue"),
            (own, 1, self._limits.max_streams, "max_streams"),
        ):
            if live + more > limit:
                raise ProtocolError(
                    "queue_full",
                    f"{live} requests are live, the limit is {limit} ({whose})",
                    allowed=f"at most {limit}",
                    id=op.id,
                    details={"limit": whose, "live": live, "retry_after_s": self._seconds_to_room()},
                )

    def _seconds_to_room(self) -> float:
        if not self._ends:
            return RETRY_AFTER_S
        return round(max(0.1, (monotonic() - self._ends[0]) / len(self._ends)), 2)

    # --- sending ----------------------------------------------------------------------------------------------

    def _flush(self, live: LiveRequest) -> None:
        """Send what waits for this client, as far as it reads."""
        if live.over:
            self._record(live)
            self._engine.moved(live.rid)
        while (payload := live.next_event()) is not None:
            delivery = client_port.send(self._clients, live.route.frames(payload))
            if delivery is Delivery.FULL:
                self._block(live)
                return
            if delivery is Delivery.GONE:
                self._client_gone(live.route.identity)
                return
            live.sent()
            if live.rid in self._blocked:
                self._blocked[live.rid] = monotonic()
        self._blocked.pop(live.rid, None)
        if live.delivered:
            self._forget(live)

    def _block(self, live: LiveRequest) -> None:
        """Its events wait. Past the bound of its client the stream ends, and says so: a gap would be a lie."""
        self._blocked.setdefault(live.rid, monotonic())
        if live.over:
            return
        blocked = (self._live[rid] for rid in self._blocked if rid in self._live)
        waiting = sum(other.pending_ids for other in blocked if other.route.identity == live.route.identity)
        if waiting > MAX_PENDING_IDS:
            live.drop_pending_tokens()
            live.fail(ProtocolError("slow_consumer", f"{waiting} tokens wait for this client, which does not read"))
            self._engine.cancel(live.unfinished, "cancelled")

    def _client_gone(self, identity: bytes) -> None:
        for live in [live for live in self._live.values() if live.route.identity == identity]:
            if not live.over:
                self._engine.cancel(live.unfinished, "cancelled")
            self._forget(live)

    def _record(self, live: LiveRequest) -> None:
        """Once for every request, when its end is known and not when its client has read of it."""
        if not live.recorded:
            live.recorded = True
            self._telemetry.finished(live.record())

    def _forget(self, live: LiveRequest) -> None:
        self._record(live)
        self._leave_turn(live, started=False)
        self._live.pop(live.rid, None)
        for choice in live.choices:
            self._by_choice.pop(choice.rid, None)
            self._engine.moved(choice.rid)
        if self._by_stream.pop((live.route.identity, live.client_id), None) is not None:
            self._count_end(live.route.identity)
        self._blocked.pop(live.rid, None)

    def _count_end(self, identity: bytes) -> None:
        self._ends.append(monotonic())
        self._streams[identity] -= 1
        if not self._streams[identity]:
            del self._streams[identity]

    def _prune_deadlines(self) -> None:
        """Most requests end long before their deadline: the heap keeps the living ones."""
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._live]
            heapq.heapify(self._deadlines)

    def work(self) -> bool:
        for identity in self._peers.left():
            self._client_gone(identity)
        now = monotonic()
        self._board.turns += 1
        for rid, since in list(self._blocked.items()):
            live = self._live.get(rid)
            if live is None:
                continue
            if live.over and now - since > GIVE_UP_SECONDS:
                self._client_gone(live.route.identity)
            else:
                self._flush(live)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, rid = heapq.heappop(self._deadlines)
            if rid in self._live:
                self._end_early(self._live[rid], "deadline_exceeded")
        self._board.front = {"live": len(self._live), "blocked": len(self._blocked)}
        if self._draining and not self._engine.up and all(live.over for live in self._live.values()):
            self._board.set_phase("stopped")
        return False

    def poll_timeout_ms(self) -> int:
        if self._blocked:
            return RETRY_BLOCKED_MS
        if self._deadlines:
            return max(0, min(IDLE_MS, int((self._deadlines[0][0] - monotonic()) * 1000) + 1))
        return IDLE_MS
