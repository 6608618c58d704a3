"""A ROUTER in a thread that speaks the protocol without a model, and misbehaves on request.

What a prompt makes it do is its first word: see `Behaviour`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack
import zmq

from deepinfer.clients import Timeouts

QUICK = Timeouts(connect=2.0, call=2.0, idle=0.3, close=1.0)
"""For clients of the fake, so that a test of silence is short."""
USAGE = {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 0, "total_tokens": 3}
TIMINGS = {"queue_s": 0.0, "prefill_s": 0.1, "ttft_s": 0.2, "decode_s": 0.3, "swapped_s": 0.0, "parks": 0}


def event(name: str, id: Any, **fields: Any) -> bytes:
    return msgpack.packb({"v": 1, "event": name, "id": id, **fields})


class FakeStream:
    """One live stream of the fake: sends numbered events."""

    def __init__(self, send: Callable[[bytes], None], id: Any) -> None:
        self.id = id
        self.seq = 0
        self.ids = 0
        self._send = send

    def emit(self, name: str, **fields: Any) -> None:
        self._send(event(name, self.id, seq=self.seq, **fields))
        self.seq += 1

    def accept(self) -> None:
        self.emit("accepted", prompt_tokens=3, model="fake", seed=7, max_new_tokens=8)

    def token(self, text: str) -> None:
        self.emit("token", text=text, ids=[self.ids], index=self.ids)
        self.ids += 1

    def done(self, reason: str = "stop", **fields: Any) -> None:
        fields |= {"usage": {**USAGE, "completion_tokens": self.ids}, "timings": TIMINGS}
        self.emit("done", finish_reason=reason, events=self.seq + 1, **fields)


class FakeServer:
    """Runs from construction to `close`. `requests` are all requests in the order of arrival."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", context: zmq.Context | None = None) -> None:
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.requests: list[dict[str, Any]] = []
        self.second_frames: list[bytes] = []
        self.deaf = False
        """Reads, but never answers."""
        self._open: dict[tuple[bytes, Any], FakeStream] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            if self._own_context:
                self._context.term()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for_op(self, op: str, seconds: float = 5.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = [request for request in self.requests if request["op"] == op]
            if found:
                return found[-1]
            time.sleep(0.005)
        raise AssertionError(f"no {op} came within {seconds} s")

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20):
                identity, *frames = self._socket.recv_multipart()
                self.second_frames += frames[1:]
                self._handle(identity, msgpack.unpackb(frames[0]))
        self._socket.close()

    def _handle(self, identity: bytes, request: dict[str, Any]) -> None:
        self.requests.append(request)
        if self.deaf:
            return

        def send(payload: bytes) -> None:
            self._socket.send_multipart([identity, payload])

        op, id = request["op"], request.get("id")
        if op == "generate":
            self._generate(identity, send, request)
        elif op == "cancel":
            stream = self._open.pop((identity, id), None)
            send(event("reply", id, op="cancel", data={"found": stream is not None}))
            if stream is not None:
                stream.done("cancelled")
        elif op == "status":
            send(event("error", id, code="not_ready", message="still loading", retry=True))
        else:
            send(event("reply", id, op=op, data=_reply(request)))

    def _generate(self, identity: bytes, send: Callable[[bytes], None], request: dict[str, Any]) -> None:
        prompt = request.get("prompt", "echo")
        stream = FakeStream(send, request["id"])
        word, _, rest = prompt.partition(" ")
        behaviour = getattr(Behaviour, word, None)
        if behaviour is None:
            raise AssertionError(f"the fake server knows no behaviour {word!r}")
        if behaviour(stream, rest, request):
            self._open[identity, request["id"]] = stream


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "models": {"models": [{"id": "fake"}]},
        "tokenize": {"ids": [len(str(request.get("text")))], "count": 1},
        "detokenize": {"text": "text"},
        "metrics": {"kv_blocks": 3},
        "ping": {"phase": "ready"},
    }[request["op"]]


class Behaviour:
    """Each returns True when the stream stays open until it is cancelled."""

    @staticmethod
    def echo(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        if request.get("stream") is False:
            whole = {"text": rest, "ids": [1, 2], "model": "fake", "seed": 7}
            stream.done(**whole)
            return False
        stream.accept()
        for character in rest:
            stream.token(character)
        stream.done()
        return False

    @staticmethod
    def hang(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        """Accepts, sends `rest` as tokens, then says nothing more."""
        stream.accept()
        for character in rest:
            stream.token(character)
        return True

    @staticmethod
    def silent(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        return True

    @staticmethod
    def pause(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        """Preempted for `rest` seconds in the middle of its answer."""
        stream.accept()
        stream.token("a")
        stream.emit("preempted")
        time.sleep(float(rest))
        stream.emit("resumed")
        stream.token("b")
        stream.done()
        return False

    @staticmethod
    def refuse(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        fields = {"field": "temperature", "value": "99", "allowed": "a finite number from 0 to 10"}
        stream._send(event("error", stream.id, code=rest, message="no", retry=False, **fields))
        return False

    @staticmethod
    def fail(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        """An error that ends a stream which had begun."""
        stream.accept()
        stream.token("a")
        stream.emit("error", code=rest, message="it broke", retry=True, events=stream.seq + 1)
        return False

    @staticmethod
    def skip(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        """Loses an event."""
        stream.accept()
        stream.seq += 1
        stream.token("a")
        stream.done()
        return True

    @staticmethod
    def miscount(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        stream.accept()
        stream.emit("done", finish_reason="stop", usage=USAGE, timings=TIMINGS, events=stream.seq + 9)
        return False

    @staticmethod
    def novel(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        """Sends an event and a field that this version of the client does not know."""
        stream.accept()
        stream.emit("celebration", loud=True)
        stream.emit("token", text="a", ids=[0], index=0, colour="blue")
        stream.ids = 1
        stream.done()
        return False

    @staticmethod
    def garbage(stream: FakeStream, rest: str, request: dict[str, Any]) -> bool:
        stream._send(bytes.fromhex(rest))
        return False
