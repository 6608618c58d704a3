"""Streams of clients, from `accepted` to the terminal event: what engines say of them, who ends them, what was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from deepinfer.stages import messages
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.choice import Choice
from deepinfer.stages.client_port import Delivery
from deepinfer.stages.engine_port import EnginePort
from deepinfer.stages.live import LiveRequest
from deepinfer.stages.live_table import LiveTable
from deepinfer.stages.protocol import ProtocolError
from deepinfer.stages.stage import monotonic
from deepinfer.stages.telemetry import Telemetry

MAX_PENDING_SIZE = 32768
"""Of what waits for one client that does not read, over all its streams: 8,192 tokens, 1,365 with 20 likely ones each.
A few megabytes."""
MAX_GROWTH = MAX_PENDING_SIZE // 8
RETRY_SECONDS = 0.005
RETRY_PAUSES = 9
"""Times as long as a retry took, until the next one: those who do not read take a tenth of the time at most."""
GIVE_UP_SECONDS = 30.0
"""A client that has not taken its last events for this long is treated as gone."""


class ClientStreams:
    """Owned by admission, used in its thread. `send` sends frames to a client, without waiting for it.

    Whatever happens to a stream goes into its `LiveRequest`, and `_flush` then sends what its client will read. A
    stream is forgotten when its last event has left, or when its client has.
    """

    def __init__(
        self,
        table: LiveTable,
        engine: EnginePort,
        board: StatusBoard,
        telemetry: Telemetry,
        send: Callable[[list[bytes]], Delivery],
    ) -> None:
        self._table = table
        self._engine = engine
        self._board = board
        self._telemetry = telemetry
        self._send = send
        self._blocked: dict[int, float] = {}
        """Requests whose client does not read now, and since when."""
        self._grown: Counter[bytes] = Counter()
        """What has been added to that of a client which does not read since its bound was looked at."""
        self._next_retry = 0.0

    @property
    def blocked(self) -> int:
        """How many wait for their client to read."""
        return len(self._blocked)

    def open(self, live: LiveRequest, deadline_ms: int | None) -> None:
        """From here on its client is owed a terminal event."""
        self._table.enter(live, deadline_ms)
        self._engine.submit(live)
        live.accept()
        self._flush(live)

    # --- what an engine says ----------------------------------------------------------------------------------

    def on_tokens(self, message: messages.Tokens) -> None:
        """First all of them are taken, then all are sent: libzmq's thread, once awake, finds many to write at once."""
        self._board.advances += len(message.items)
        told: dict[int, LiveRequest] = {}
        for item in message.items:
            live = self._table.by_choice.get(item.rid)
            if live is None:
                continue
            choice = live.choice(item.rid)
            if live.hears(choice):
                size = live.pending_size
                self._take_token(live, choice, item)
                self._note_growth(live, live.pending_size - size)
            self._engine.moved(item.rid)
            told[live.rid] = live
        for live in told.values():
            if live in self._table:  # Its client may have been found gone.
                self._flush(live)

    def _note_growth(self, live: LiveRequest, size: int) -> None:
        """Between two retries a fast engine may say more than the bound of a client."""
        if live.rid in self._blocked:
            identity = live.route.identity
            self._grown[identity] += size
            if self._grown[identity] > MAX_GROWTH:
                self._keep_bound(identity)

    def _take_token(self, live: LiveRequest, choice: Choice, item: messages.TokenItem) -> None:
        self._table.started(live)
        before = choice.clock.last_token
        live.token(choice, item)
        now = choice.clock.last_token or monotonic()
        if before is not None:
            self._telemetry.next_token(now - before)
        elif choice is live.choices[0]:
            self._telemetry.first_token(now - choice.clock.submitted, live.prompt_tokens)
        if choice.stopped:
            self._engine.cancel([choice], "stop")

    def on_preempted(self, message: messages.Preempted) -> None:
        live = self._table.by_choice.get(message.rid)
        if live is not None:
            self._preempt(live, live.choice(message.rid))
            self._flush(live)

    def _preempt(self, live: LiveRequest, choice: Choice, reason: str | None = None) -> None:
        if not choice.clock.parked:
            self._telemetry.event("preempted", request=choice.rid, id=live.client_id, reason=reason)
        live.preempted(choice, reason)

    def on_resumed(self, message: messages.Resumed) -> None:
        live = self._table.by_choice.get(message.rid)
        if live is not None:
            self._telemetry.event("resumed", request=message.rid, id=live.client_id)
            live.resumed(live.choice(message.rid))
            self._flush(live)

    def on_finished(self, message: messages.Finished) -> None:
        live = self._table.by_choice.get(message.rid)
        if live is not None:
            live.finish(message)
            self._engine.moved(message.rid)
            if live.over:
                self._engine.cancel(live.unfinished, "cancelled")
            self._flush(live)

    # --- what else happens to them ----------------------------------------------------------------------------

    def bereave_all(self) -> None:
        """The engine that had them is dead. Who was cancelled ends here; everyone else waits for the next one."""
        for live in list(self._table.requests()):
            if not live.over:
                self._bereave(live)

    def _bereave(self, live: LiveRequest) -> None:
        for choice in [choice for choice in live.unfinished if choice.submitted]:
            choice.submitted = False
            if choice.cancelled:
                self._end_here(live, choice, choice.cancelled)
            else:
                self._preempt(live, choice, "engine_restart")
        self._flush(live)

    def end_early(self, live: LiveRequest, reason: str) -> None:
        """The engine will end it; if no engine has it, it ends here."""
        for choice in self._engine.cancel(live.unfinished, reason):
            self._end_here(live, choice, reason)
        self._flush(live)

    def _end_here(self, live: LiveRequest, choice: Choice, reason: str) -> None:
        live.finish(messages.Finished(rid=choice.rid, reason=reason, timings=choice.clock.timings()))

    def fail(self, live: LiveRequest, error: ProtocolError) -> None:
        """It ends now, whatever an engine does with it."""
        live.fail(error)
        self._flush(live)

    def fail_all(self, error: ProtocolError) -> None:
        for live in list(self._table.requests()):
            self.fail(live, error)

    def client_gone(self, identity: bytes) -> None:
        for live in self._table.of(identity):
            if not live.over:
                self._engine.cancel(live.unfinished, "cancelled")
            self._forget(live)
        del self._grown[identity]

    # --- sending ----------------------------------------------------------------------------------------------

    def retry(self, now: float) -> None:
        """Try again to send to those who did not read. All streams of a client share what it has not read, so where one
        of them is still held up, the others are. Who has long not taken a last event is gone."""
        if not self._blocked or now < self._next_retry:
            return
        began = monotonic()
        full: set[bytes] = set()
        for rid, since in list(self._blocked.items()):
            live = self._table.get(rid)
            if live is None:
                continue
            if live.over and now - since > GIVE_UP_SECONDS:
                self.client_gone(live.route.identity)
            elif live.route.identity not in full and not self._send_waiting(live):
                full.add(live.route.identity)
        for identity in full:
            self._keep_bound(identity)
        took = monotonic() - began
        self._next_retry = now + max(RETRY_SECONDS, (1 + RETRY_PAUSES) * took)

    def _keep_bound(self, identity: bytes) -> None:
        """Past the bound of a client its streams end, those with most that waits first, and say so: a gap would be a
        lie."""
        del self._grown[identity]
        sizes = {live: live.pending_size for live in self._table.of(identity) if live.rid in self._blocked}
        waiting = sum(sizes.values())
        for live in sorted(sizes, key=lambda live: sizes[live], reverse=True):
            if waiting <= MAX_PENDING_SIZE:
                return
            if live.over:
                continue
            live.drop_pending_tokens()
            live.fail(ProtocolError("slow_consumer", "too many tokens wait for this client, which does not read"))
            self._engine.cancel(live.unfinished, "cancelled")
            self._flush(live)
            waiting -= sizes[live]

    def _flush(self, live: LiveRequest) -> None:
        """Something is to be sent to this client. What is held up already waits for the next `retry`."""
        if live.over:
            self._record(live)
            self._engine.moved(live.rid)
        if live.rid not in self._blocked:
            self._send_waiting(live)

    def _send_waiting(self, live: LiveRequest) -> bool:
        """Send what waits, as far as its client reads. False when that is not all."""
        while (payload := live.next_event()) is not None:
            delivery = self._send(live.route.frames(payload))
            if delivery is Delivery.FULL:
                self._blocked.setdefault(live.rid, monotonic())
                return False
            if delivery is Delivery.GONE:
                self.client_gone(live.route.identity)
                return True
            live.sent()
            if live.rid in self._blocked:
                self._blocked[live.rid] = monotonic()
        self._blocked.pop(live.rid, None)
        if live.delivered:
            self._forget(live)
        return True

    def _record(self, live: LiveRequest) -> None:
        """Once for every request, when its end is known and not when its client has read of it."""
        if not live.recorded:
            live.recorded = True
            self._telemetry.finished(live.record())

    def _forget(self, live: LiveRequest) -> None:
        """First it leaves the table: an engine that is free for others must not be given its choices."""
        self._record(live)
        self._table.leave(live)
        self._blocked.pop(live.rid, None)
        live.drop_pending_tokens()
        for choice in live.choices:
            self._engine.moved(choice.rid)
