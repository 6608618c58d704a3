"""What benches of a daemon share: one of their own, random prompts, and streams of which every event has its time."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import numpy as np
import zmq

from deepinfer.clients import Client
from deepinfer.clients.wire import pack_request, unpack_event
from deepinfer.daemon.commands import stop_daemon


@contextmanager
def started_daemon(*options: str) -> Iterator[Client]:
    """A real one, with a runtime folder of its own, that has answered once. Stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="dpi-") as folder:
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


def random_prompt(tokens: int, number: int, vocab_size: int = 40_000) -> list[int]:
    """Random ids, the same in every run."""
    return np.random.default_rng(1000 + number).integers(100, vocab_size, tokens).tolist()


@dataclass
class Seen:
    """What arrived of one stream, and when, in seconds of time.perf_counter()."""

    tokens: list[float] = field(default_factory=list)
    """One time for each token."""
    moves: list[tuple[float, str]] = field(default_factory=list)
    """`preempted` and `resumed`."""
    done: dict[str, Any] | None = None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Pauses between tokens that did not come together: when each began and when it ended."""
        return [(a, b) for a, b in zip(self.tokens, self.tokens[1:], strict=False) if b > a]

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


class Streams:
    """Any number of greedy streams over one bare socket, so that little of the machine goes to the measuring. An error
    event raises click.ClickException."""

    def __init__(self, client: Client) -> None:
        self.seen: list[Seen] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(client.connection.endpoint)

    def send(self, prompt: list[int], new_tokens: int, **fields: Any) -> Seen:
        fields = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0, **fields}
        self._socket.send_multipart(pack_request("generate", len(self.seen), fields, prompt))
        self.seen.append(Seen())
        return self.seen[-1]

    def until(self, reached: Callable[[], bool]) -> None:
        """Read events until it is so."""
        while not reached():
            event = unpack_event(self._socket.recv_multipart())
            if event["event"] == "error":
                raise click.ClickException(event["message"])
            self._note(self.seen[event["id"]], event, time.perf_counter())

    def until_all_done(self) -> None:
        self.until(lambda: all(seen.done for seen in self.seen))

    def _note(self, seen: Seen, event: dict[str, Any], now: float) -> None:
        seen.tokens += [now] * len(event.get("ids", ()))
        if event["event"] in ("preempted", "resumed"):
            seen.moves.append((now, event["event"]))
        if event["event"] == "done":
            seen.done = event

    def __enter__(self) -> Streams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()
