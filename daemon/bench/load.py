"""What benches of a daemon share: one of their own, random prompts, and streams of which every event has its time."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import click
import numpy as np
import zmq

from deepinfer.clients import Client, DeepInferError
from deepinfer.clients.keys import use_keys
from deepinfer.clients.wire import pack_request, unpack_event
from deepinfer.daemon.commands import stop_daemon
from deepinfer.stages.decode import SNAPSHOT_SECONDS

Measured = TypeVar("Measured")

SILENCE_SECONDS = 60.0
"""Without an event of any stream, after which the daemon is asked whether it is still there."""


@contextmanager
def started_daemon(*options: str) -> Iterator[Client]:
    """A real one, with a runtime folder of its own, that has answered once. Stopped at the end."""
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="dpi-") as folder:
        path = Path(folder) / "run"
        command = [sys.executable, "-m", "deepinfer.daemon.cli", "start", "--detach", "--runtime-dir", str(path)]
        started = subprocess.run([*command, *options], capture_output=True, text=True)
        if started.returncode:
            raise click.ClickException(started.stderr)
        try:
            with Client(path) as client:
                client.complete("Hello", max_new_tokens=16, ignore_eos=True)
                yield client
        finally:
            stop_daemon(path, now=True)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a bench as Ctrl-C does, because the daemon is in a session of its own and would outlive it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def running_daemon(where: str) -> Iterator[Client]:
    """One that somebody else has started: an endpoint, a connection file or a runtime folder. It is left running."""
    try:
        client = Client(where)
    except DeepInferError as error:
        raise click.ClickException(f"connect is {where!r}: {error.message}") from error
    with client:
        yield client


PROMPT_VOCABULARY = 40_000


def prompt_vocabulary(client: Client) -> int:
    """Of how many ids random prompts are made: the same for every model that has so many."""
    return min(PROMPT_VOCABULARY, int(client.connection.limits["vocab_size"]))


def random_prompt(tokens: int, number: int, vocab_size: int) -> list[int]:
    """Random ids, the same in every run."""
    return np.random.default_rng(1000 + number).integers(100, vocab_size, tokens).tolist()


@dataclass
class Seen:
    """What arrived of one stream, and when, in seconds of time.perf_counter()."""

    id: int = 0
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    """One time for each token."""
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    moves: list[tuple[float, str]] = field(default_factory=list)
    """`preempted` and `resumed`."""
    ended: float = 0.0
    """When `done` or `error` came."""
    done: dict[str, Any] | None = None
    error: str | None = None

    @property
    def over(self) -> bool:
        return self.done is not None or self.error is not None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Pauses between tokens that did not come together: when each began and when it ended."""
        return [(a, b) for a, b in zip(self.tokens, self.tokens[1:], strict=False) if b > a]

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


def while_all_decode(arrivals: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Tokens of all streams, by the times at which each of their tokens arrived, and seconds: from the last first token
    to the first last one. Zeros where the streams never decoded together."""
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    if begin >= end:
        return 0, 0.0
    return sum(begin < moment <= end for times in arrivals for moment in times), end - begin


class NeverTogether(click.ClickException):
    """One stream of a run ended before another one had begun, so that there is nothing to measure."""

    def __init__(self, streams: int) -> None:
        super().__init__(f"the first of {streams} streams ended before the last one began; use more new tokens")


def step_together(seen: Sequence[Seen]) -> float:
    """Mean seconds of a decode step over all streams while every one of them decodes. A mean, because a client that was
    put aside reads several steps at once. Raises NeverTogether."""
    tokens, seconds = while_all_decode([one.tokens for one in seen])
    if tokens < len(seen):
        raise NeverTogether(len(seen))
    return seconds * len(seen) / tokens


TRIES = 5


def until_together(measure: Callable[[], Measured]) -> Measured:
    """What `measure` returns. Where its streams never decoded together, because the machine put this client or the
    daemon aside meanwhile, it is called again, and that is said; raises NeverTogether where it was so TRIES times."""
    for number in range(1, TRIES):
        try:
            return measure()
        except NeverTogether:
            click.echo(f"the streams never decoded together; measured again ({number})", err=True)
    return measure()


def settled_counters(client: Client) -> dict[str, float]:
    """Of a snapshot that was taken after everything that has been answered so far."""
    time.sleep(2 * SNAPSHOT_SECONDS)
    return client.status()["counters"]


class Streams:
    """Any number of greedy streams over one bare socket, so that little of the machine goes to the measuring.

    An error event raises click.ClickException, unless `keep_errors`: then it ends its stream. So does a daemon that
    has gone.
    """

    def __init__(self, client: Client, keep_errors: bool = False) -> None:
        self.seen: list[Seen] = []
        self.live = 0
        """Streams that have not ended."""
        self._client = client
        self._keep_errors = keep_errors
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._patience = -1
        """Milliseconds that the socket waits for an event: to ask it first whether there is one costs as much again."""
        if client.connection.curve is not None:
            use_keys(self._socket, client.connection.curve)
        self._socket.connect(client.connection.endpoint)

    def send(self, ids: list[int] | None, new_tokens: int, **fields: Any) -> Seen:
        """`ids`: of the prompt; None where `fields` have a `prompt` or `messages`."""
        fields = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0, **fields}
        id = len(self.seen)
        frames = pack_request("generate", id, fields, ids)
        self.seen.append(Seen(id, time.perf_counter()))
        self.live += 1
        self._socket.send_multipart(frames)
        return self.seen[-1]

    def cancel(self, seen: Seen) -> None:
        """Its `done` is still to come."""
        self._socket.send_multipart(pack_request("cancel", seen.id, {}))

    def read(self, seconds: float) -> bool:
        """Waits at most so long for an event, and reads it. False: there was none."""
        patience = max(0, math.ceil(seconds * 1000))
        if patience != self._patience:
            self._patience = self._socket.rcvtimeo = patience
        try:
            frames = self._socket.recv_multipart()
        except zmq.Again:
            return False
        self._note(unpack_event(frames), time.perf_counter())
        return True

    def wait(self, seconds: float = SILENCE_SECONDS) -> None:
        """As `read`; where nothing comes for long, the daemon must at least answer a ping."""
        if self.read(min(seconds, SILENCE_SECONDS)) or seconds < SILENCE_SECONDS:
            return
        try:
            self._client.ping()
        except DeepInferError as error:
            raise click.ClickException(
                f"the daemon has gone while {self.live} requests ran: {error.message}"
            ) from error

    def until(self, reached: Callable[[], bool]) -> None:
        """Read events until it is so."""
        while not reached():
            self.wait()

    def until_all_done(self) -> None:
        self.until(lambda: not self.live)

    def _note(self, event: dict[str, Any], now: float) -> None:
        if event["event"] == "reply":
            return
        if event["event"] == "error" and (not self._keep_errors or event.get("id") is None):
            raise click.ClickException(event["message"])
        seen = self.seen[event["id"]]
        ids = event.get("ids", ())
        seen.tokens += [now] * len(ids)
        seen.ids += ids
        if event.get("text"):
            seen.texts.append(event["text"])
        if event["event"] in ("preempted", "resumed"):
            seen.moves.append((now, event["event"]))
        if event["event"] in ("done", "error"):
            seen.ended = now
            self.live -= 1
        if event["event"] == "done":
            seen.done = event
        elif event["event"] == "error":
            seen.error = event["message"]

    def __enter__(self) -> Streams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()
