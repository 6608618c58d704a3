"""Which requests are live: found by connection, stream, choice or deadline, and counted against the limits."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, ValuesView

from deepinfer.stages.live import LiveRequest
from deepinfer.stages.protocol import Generate, Limits, ProtocolError, RequestId
from deepinfer.stages.stage import monotonic
from deepinfer.stages.turns import Turns

STARTED = -1
"""The turn of a request that waits no more."""
ENDS_REMEMBERED = 32
RETRY_AFTER_S = 1.0
"""What is said when the queue is full and nothing has ended yet."""


class LiveTable:
    """Owned by admission. A request is here from `enter` to `leave`; only `ClientStreams` calls these two."""

    def __init__(self) -> None:
        self.by_choice: dict[int, LiveRequest] = {}
        """By the ids that the engine knows, in order of arrival."""
        self.deadlines: list[tuple[float, int]] = []
        """A heap. Requests that have ended may still be in it."""
        self._by_rid: dict[int, LiveRequest] = {}
        self._by_stream: dict[tuple[bytes, RequestId], LiveRequest] = {}
        self._streams: Counter[bytes] = Counter()
        """Live streams by connection."""
        self._turns = Turns()
        self._ends: deque[float] = deque(maxlen=ENDS_REMEMBERED)
        """When the last requests ended."""

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, live: LiveRequest) -> bool:
        return live.rid in self._by_rid

    def requests(self) -> ValuesView[LiveRequest]:
        return self._by_rid.values()

    def get(self, rid: int) -> LiveRequest | None:
        """By the id of its first choice."""
        return self._by_rid.get(rid)

    def stream(self, identity: bytes, id: RequestId) -> LiveRequest | None:
        """By its connection and the id that its client gave it."""
        return self._by_stream.get((identity, id))

    def of(self, identity: bytes) -> list[LiveRequest]:
        """All of one connection."""
        return [live for live in self._by_rid.values() if live.route.identity == identity]

    # --- coming and going -------------------------------------------------------------------------------------

    def check_id(self, identity: bytes, op: Generate) -> None:
        """Raises ProtocolError `duplicate_id`."""
        if (identity, op.id) in self._by_stream:
            message = f"id: a stream with the id {op.id!r} is live on this connection"
            raise ProtocolError("duplicate_id", message, field="id", value=repr(op.id), id=op.id)

    def check_room(self, identity: bytes, op: Generate, limits: Limits) -> None:
        """Every choice takes a place in the queue. `retry_after_s`: how long it took lately until a request ended.
        Raises ProtocolError `queue_full`."""
        own = self._streams[identity]
        for live, more, limit, whose in (
            (len(self.by_choice), op.n, limits.max_queue, "max_queue"),
            (own, 1, limits.max_streams, "max_streams"),
        ):
            if live + more > limit:
                raise ProtocolError(
                    "queue_full",
                    f"{live} requests are live, the limit is {limit} ({whose})",
                    allowed=f"at most {limit}",
                    id=op.id,
                    details={"limit": whose, "live": live, "retry_after_s": self._seconds_to_room()},
                )

    def enter(self, live: LiveRequest, deadline_ms: int | None) -> None:
        """It comes, and waits for its turn until `started` or `leave`."""
        identity = live.route.identity
        self._by_rid[live.rid] = live
        self.by_choice |= dict.fromkeys((choice.rid for choice in live.choices), live)
        self._by_stream[(identity, live.client_id)] = live
        self._streams[identity] += 1
        if deadline_ms is not None:
            heapq.heappush(self.deadlines, (monotonic() + deadline_ms / 1000, live.rid))
            self._prune_deadlines()
        live.turn, live.waits = self._turns.take(live.priority, identity), True

    def started(self, live: LiveRequest) -> None:
        """It has a token. It goes before all that wait, should its engine die."""
        self._leave_turn(live, started=True)

    def leave(self, live: LiveRequest) -> None:
        """Any number of times."""
        identity = live.route.identity
        self._leave_turn(live, started=False)
        self._by_rid.pop(live.rid, None)
        for choice in live.choices:
            self.by_choice.pop(choice.rid, None)
        if self._by_stream.pop((identity, live.client_id), None) is not None:
            self._ends.append(monotonic())
            self._streams[identity] -= 1
            if not self._streams[identity]:
                del self._streams[identity]

    def _leave_turn(self, live: LiveRequest, started: bool) -> None:
        """Once for every request."""
        if live.waits:
            live.waits, live.turn = False, STARTED
            self._turns.leave(live.priority, live.route.identity, started)

    def _seconds_to_room(self) -> float:
        if not self._ends:
            return RETRY_AFTER_S
        return round(max(0.1, (monotonic() - self._ends[0]) / len(self._ends)), 2)

    # --- deadlines --------------------------------------------------------------------------------------------

    def overdue(self, now: float) -> Iterator[LiveRequest]:
        """Each once. Whoever iterates may end requests meanwhile."""
        while self.deadlines and self.deadlines[0][0] <= now:
            _, rid = heapq.heappop(self.deadlines)
            if rid in self._by_rid:
                yield self._by_rid[rid]

    def seconds_to_deadline(self) -> float | None:
        """Until the next one, below 0 when it has passed; None when there is none."""
        return self.deadlines[0][0] - monotonic() if self.deadlines else None

    def _prune_deadlines(self) -> None:
        """Most requests end long before their deadline: the heap keeps the living ones."""
        if len(self.deadlines) > 2 * len(self._by_rid) + 64:
            self.deadlines = [entry for entry in self.deadlines if entry[1] in self._by_rid]
            heapq.heapify(self.deadlines)
