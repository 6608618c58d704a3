"""A process beside a stress run: `python -m deepinfer.daemon.stress.bystander ROLE ENDPOINT [NUMBERS]`.

In a process of its own, because whoever measures must not be held up by whom it measures. It says that it has begun by
a line, goes on until its standard input ends, and its last line is what it has seen, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

import msgpack
import zmq

ASK_MS = 2
"""Between an answer of the control socket and the next question."""
ANSWER_MS = 30_000
END_SECONDS = 60.0


class Bystander:
    """Such a process, as the run sees it. `seen` is there after `with`."""

    def __init__(self, role: str, endpoint: str, *numbers: int) -> None:
        self.seen: Any = None
        command = [sys.executable, "-m", "deepinfer.daemon.stress.bystander", role, endpoint, *map(str, numbers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Bystander:
        if self._process.stdout is not None:
            self._process.stdout.readline()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            words, _ = self._process.communicate(timeout=END_SECONDS)
            self.seen = json.loads(words) if words.strip() else None
        finally:
            self._process.kill()
            self._process.wait()


def ask_control(context: zmq.Context, endpoint: str) -> list[float]:
    """Seconds that each answer to `status` took."""
    socket = context.socket(zmq.REQ)
    socket.connect(endpoint)
    question = msgpack.packb({"v": 1, "op": "status"})
    seconds: list[float] = []
    _begun()
    while not _told_to_end(ASK_MS):
        began = time.perf_counter()
        socket.send(question)
        if not socket.poll(ANSWER_MS):
            return [*seconds, ANSWER_MS / 1000]
        socket.recv()
        seconds.append(time.perf_counter() - began)
    return seconds


def read_streams(context: zmq.Context, endpoint: str, streams: int, tokens: int, likely: int) -> None:
    socket = _with_streams(context, endpoint, streams, tokens, likely)
    _begun()
    while not _told_to_end(0):
        for _ in range(200):
            if not socket.poll(20):
                break
            socket.recv()


def never_read_streams(context: zmq.Context, endpoint: str, streams: int, tokens: int, likely: int) -> None:
    _socket = _with_streams(context, endpoint, streams, tokens, likely)
    _begun()
    sys.stdin.read()


def _with_streams(context: zmq.Context, endpoint: str, streams: int, tokens: int, likely: int) -> zmq.Socket:
    """What is not read is not kept on this side. `likely`: with each token that many are told, if any."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 1)
    socket.connect(endpoint)
    for number in range(streams):
        fields = {"prompt": f"{number} is", "max_new_tokens": tokens, "ignore_eos": True}
        fields |= {"logprobs": likely} if likely else {}
        socket.send(msgpack.packb({"v": 1, "op": "generate", "id": number, **fields}))
    return socket


def read_metrics(context: zmq.Context, endpoint: str) -> None:
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)
    _begun()
    while not _told_to_end(0):
        if socket.poll(20):
            socket.recv_multipart()


def never_read_metrics(context: zmq.Context, endpoint: str) -> None:
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVHWM, 1)
    socket.subscribe(b"")
    socket.connect(endpoint)
    _begun()
    sys.stdin.read()


def _begun() -> None:
    print("begun", flush=True)


def _told_to_end(milliseconds: int) -> bool:
    """Standard input has ended; waits at most so long for it."""
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    return bool(poller.poll(milliseconds))


ROLES = {
    "control": ask_control,
    "reads": read_streams,
    "never-reads": never_read_streams,
    "reads-metrics": read_metrics,
    "never-reads-metrics": never_read_metrics,
}

if __name__ == "__main__":
    context = zmq.Context()
    context.linger = 0
    seen = ROLES[sys.argv[1]](context, sys.argv[2], *map(int, sys.argv[3:]))  # type: ignore[operator]
    print(json.dumps(seen), flush=True)
    context.destroy(linger=0)
