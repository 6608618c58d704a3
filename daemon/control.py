"""The control socket: status, stop and the like, answered by a thread that does nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import zmq

from deepinfer.daemon.second_address import bind_both
from deepinfer.daemon.setting import ConfigError
from deepinfer.stages import client_port
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.client_port import Delivery
from deepinfer.stages.curve import Curve
from deepinfer.stages.live import Route
from deepinfer.stages.protocol import ProtocolError, is_req
from deepinfer.stages.protocol_events import encode_error, encode_reply
from deepinfer.stages.stage import Stage

MAX_FRAME_BYTES = 4096
MAX_DRAIN_SECONDS = 7 * 24 * 3600


class ControlRequest(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    op: str
    id: str | int | None = None
    now: bool = False
    """With `stop`: cut running requests instead of letting them finish."""
    seconds: Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAIN_SECONDS)] | None = None
    """With `drain`: how long running requests get."""


Action = Callable[[ControlRequest], Mapping[str, Any]]


_decoder = msgspec.msgpack.Decoder(ControlRequest)


class ControlStage(Stage):
    """`actions` are the operations by name. They are called in this thread, must return at once, and may raise
    ConfigError or ProtocolError.

    `address` lies in the private runtime folder and has no keys; `second_address` has, if there is a `curve`.
    """

    name = "control"

    def __init__(
        self,
        context: zmq.Context,
        inbox: str,
        address: str,
        board: StatusBoard,
        actions: Mapping[str, Action],
        second_address: str | None = None,
        curve: Curve | None = None,
    ) -> None:
        super().__init__(context, inbox, {})
        self._address, self._second_address, self._curve = address, second_address, curve
        self._board = board
        self._actions: dict[str, Action] = {
            "status": lambda _: board.status(),
            "ping": lambda _: {"phase": board.phase},
            **actions,
        }

    def opened(self) -> None:
        self._socket = self.new_socket(zmq.ROUTER, poll=True)
        client_port.configure(self._socket, MAX_FRAME_BYTES)
        bind_both(self._socket, self._address, "control_endpoint", self._second_address, self._curve, self._board)

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
            raise ProtocolError(
                "malformed", f"a control request is a map of v, op, id, now and seconds: {error}"
            ) from error
        if request.v != 1:
            raise ProtocolError("unsupported_version", f"v: {request.v} is not spoken here, 1 is", field="v")
        return encode_reply(request.op, request.id, self._perform(request))

    def _perform(self, request: ControlRequest) -> Mapping[str, Any]:
        action = self._actions.get(request.op)
        if action is None:
            known = ", ".join(self._actions)
            message = f"op: {request.op!r} is not a control operation; allowed: {known}"
            raise ProtocolError("unknown_op", message, field="op", allowed=known)
        try:
            return action(request)
        except ConfigError as error:
            raise ProtocolError("invalid_value", str(error)) from error
