"""The clients of a stress run: many connections in one thread, every event of which is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import zmq

from deepinfer.clients import Completion, DeepInferError
from deepinfer.clients.streams import StreamState
from deepinfer.clients.wire import pack_request, unpack_event
from deepinfer.daemon.stress.jobs import Job, Question, Start

POLL_MS = 50
PING_ID = "last"


class Outcome(NamedTuple):
    """How one job ended, as its client saw it. Times in seconds."""

    job: Job
    reason: str
    """A finish reason, or "error"."""
    error: str = ""
    answer: Completion | None = None
    tokens: int = 0
    preempted: int = 0
    resumed: int = 0
    parks: int = 0
    longest_gap: float = 0.0
    swapped_seconds: float = 0.0
    cancel_sent: bool = False
    wrong: str = ""
    """What is wrong with the answer, by `Drive`'s judge; the answer itself is then dropped, for memory's sake."""


class OpenStream:
    """A job that has been sent and has not ended."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seen = {"token": 0, "preempted": 0, "resumed": 0}
        self.cancel_sent = False
        self._state = StreamState(True)

    @property
    def wants_cancel(self) -> bool:
        cancel = self.job.cancel
        return cancel is not None and not self.cancel_sent and self.seen[cancel.kind] >= cancel.after

    def feed(self, event: dict[str, Any]) -> Outcome | None:
        """The outcome, once this event was the last one."""
        try:
            self._state.feed(event)
        except DeepInferError as error:
            return self._failed(str(error))
        if event["event"] in self.seen:
            self.seen[event["event"]] += 1
        return self._finished() if self._state.ended else None

    def _failed(self, error: str) -> Outcome:
        return Outcome(self.job, "error", error, **self._seen())

    def _finished(self) -> Outcome:
        answer = self._state.completion()
        return Outcome(
            self.job,
            answer.finish_reason,
            answer=answer,
            tokens=len(answer.ids),
            parks=int(answer.timings["parks"]),
            longest_gap=answer.timings["longest_gap_s"],
            swapped_seconds=answer.timings["swapped_s"],
            **self._seen(),
        )

    def _seen(self) -> dict[str, Any]:
        return {
            "preempted": self.seen["preempted"],
            "resumed": self.seen["resumed"],
            "cancel_sent": self.cancel_sent,
        }


class Connection:
    """One DEALER socket with at most one open stream, and the job that it will send next."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.heartbeat_ivl = 2000  # These three as docs/protocol.md asks of every client.
        self.socket.heartbeat_timeout = 6000
        self.socket.heartbeat_ttl = 6000
        self.socket.connect(endpoint)
        self.open: OpenStream | None = None
        self.next: Job | None = None
        self.due = 0.0

    def send(self, job: Job, question: Question) -> None:
        fields = {**question.options, "priority": job.priority}
        self.open = OpenStream(job)
        self.socket.send_multipart(pack_request("generate", job.number, fields, question.prompt))
        self.cancel_if_due()

    def cancel_if_due(self) -> None:
        if self.open is not None and self.open.wants_cancel:
            self.open.cancel_sent = True
            self.socket.send_multipart(pack_request("cancel", self.open.job.number, {}))


class Drive:
    """Runs jobs over `clients` connections until all have ended. `strays` are events that no open stream waits for: a
    second terminal event is one.

    `judge` is called at the end of every job and says what is wrong with its answer; `alive`, whether the engine is;
    `watch` is shown every event.
    """

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        questions: Sequence[Question],
        clients: int,
        judge: Callable[[Outcome], str],
        alive: Callable[[], bool],
        watch: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.strays: list[str] = []
        self.hung = ""
        self._questions = questions
        self._judge = judge
        self._alive = alive
        self._watch = watch
        self._moments: set[Start] = set()
        self._connections = [Connection(context, endpoint) for _ in range(clients)]
        self._poller = zmq.Poller()
        for connection in self._connections:
            self._poller.register(connection.socket, zmq.POLLIN)

    def run(self, jobs: Iterator[Job], until: float, stall_seconds: float) -> None:
        """`until`: no job is begun after this time of time.monotonic()."""
        last_event = time.monotonic()
        while True:
            now = time.monotonic()
            self._begin(jobs if now < until else iter(()), now)
            if not any(connection.open or connection.next for connection in self._connections):
                break
            if self._receive():
                last_event = now
            elif now - last_event > stall_seconds or not self._alive():
                self.hung = self._describe_hang(now - last_event)
                break
        if not self.hung:
            self._collect_strays(stall_seconds)

    def close(self) -> None:
        for connection in self._connections:
            connection.socket.close()

    def _begin(self, jobs: Iterator[Job], now: float) -> None:
        for connection in self._connections:
            if connection.open is not None:
                continue
            if connection.next is None:
                connection.next = next(jobs, None)
                connection.due = now + connection.next.pause if connection.next else 0.0
            job = connection.next
            if job is not None and now >= connection.due and (job.start is None or job.start in self._moments):
                connection.next = None
                connection.send(job, self._questions[job.question])

    def _receive(self) -> bool:
        ready = dict(self._poller.poll(POLL_MS if not self._waiting() else 1))
        for connection in self._connections:
            if connection.socket in ready:
                self._read(connection)
        return bool(ready)

    def _waiting(self) -> bool:
        """Whether a job will begin by the clock alone."""
        return any(connection.next is not None and connection.next.start is None for connection in self._connections)

    def _read(self, connection: Connection) -> None:
        while connection.socket.poll(0):
            event = unpack_event(connection.socket.recv_multipart())
            if event["event"] == "reply" and event.get("op") == "cancel":
                continue
            stream = connection.open
            if stream is None or event.get("id") != stream.job.number:
                self.strays.append(f"{event['event']} of request {event.get('id')} after its end")
                continue
            outcome = stream.feed(event)
            self._watch(event)
            if event["event"] == "token":
                self._moments.add(Start(stream.job.number, "token"))
            if outcome is None:
                connection.cancel_if_due()
                continue
            connection.open = None
            self.outcomes.append(outcome._replace(wrong=self._judge(outcome), answer=None))
            self._moments |= {Start(stream.job.number, "token"), Start(stream.job.number, "end")}

    def _collect_strays(self, patience: float) -> None:
        """A ping on every connection: its reply comes after everything that was sent before it."""
        for connection in self._connections:
            connection.socket.send_multipart(pack_request("ping", PING_ID, {}))
            while connection.socket.poll(patience * 1000):
                event = unpack_event(connection.socket.recv_multipart())
                if event.get("id") == PING_ID:
                    break
                if event.get("op") != "cancel":
                    self.strays.append(f"{event['event']} of request {event.get('id')} after its end")

    def _describe_hang(self, seconds: float) -> str:
        open_jobs = [connection.open.job.number for connection in self._connections if connection.open]
        what = f"no event for {seconds:.0f} s" if self._alive() else "the engine died"
        return f"{what}, with requests {open_jobs} open"
