"""The control socket: status, metrics, stop and ping, answered by a thread that does nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from deepinfer.stages import client_port
from deepinfer.stages.admission import EndpointError
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.client_port import Delivery
from deepinfer.stages.curve import Curve
from deepinfer.stages.live import Route
from deepinfer.stages.protocol import ProtocolError, is_req
from deepinfer.stages.protocol_events import encode_error, encode_reply
from deepinfer.stages.stage import Stage
from deepinfer.stages.telemetry import Telemetry

MAX_FRAME_BYTES = 4096


class ControlRequest(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    op: str
    id: str | int | None = None
    now: bool = False
    """With `stop`: cut running requests instead of letting them finish."""


_decoder = msgspec.msgpack.Decoder(ControlRequest)


class ControlStage(Stage):
    """`stop` is called with True to cut, False to drain; it must return at once.

    `address` lies in the private runtime folder and has no keys; `second_address` has, if there is a `curve`.
    """

    name = "control"

    def __init__(
        self,
        context: zmq.Context,
        inbox: str,
        address: str,
        board: StatusBoard,
        telemetry: Telemetry,
        stop: Callable[[bool], None],
        drain_s: int,
        second_address: str | None = None,
        curve: Curve | None = None,
    ) -> None:
        super().__init__(context, inbox, {})
        self._drain_s = drain_s
        self._address, self._second_address, self._curve = address, second_address, curve
        self._board = board
        self._telemetry = telemetry
        self._stop = stop

    def opened(self) -> None:
        self._socket = self.new_socket(zmq.ROUTER, poll=True)
        client_port.configure(self._socket, MAX_FRAME_BYTES)
        self._socket.bind(self._address)
        if self._second_address is None:
            return
        if self._curve is not None:
            self._curve.secure(self._socket)
        try:
            self._socket.bind(self._second_address)
        except zmq.ZMQError as error:
            where = f"control_endpoint: cannot listen on {self._second_address}"
            raise EndpointError(f"{where}: {error.strerror}") from error
        self._board.info["control_endpoint"] = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def on_socket(self, socket: zmq.Socket) -> None:
        for identity, *frames in client_port.receive(socket, 16):
            route = Route(identity, is_req(frames))
            try:
                payload = self._answer(frames[-1] if frames else b"")
            except ProtocolError as error:
                payload = encode_error(error)
            if client_port.send(socket, route.frames(payload)) is Delivery.SENT:
                self.progress += 1

    def _answer(self, raw: bytes) -> bytes:
        try:
            request = _decoder.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError("malformed", f"a control request is a map of v, op, id and now: {error}") from error
        if request.v != 1:
            raise ProtocolError("unsupported_version", f"v: {request.v} is not spoken here, 1 is", field="v")
        return encode_reply(request.op, request.id, self._perform(request))

    def _perform(self, request: ControlRequest) -> dict[str, Any]:
        if request.op == "status":
            return self._board.status()
        if request.op == "metrics":
            return self._telemetry.metrics()
        if request.op == "ping":
            return {"phase": self._board.phase}
        if request.op == "stop":
            self._stop(request.now)
            return {"stopping": True, "now": request.now, "pid": os.getpid(), "drain_s": self._drain_s}
        raise ProtocolError(
            "unknown_op",
            f"op: {request.op!r} is not a control operation",
            field="op",
            allowed="status, metrics, stop, ping",
        )
