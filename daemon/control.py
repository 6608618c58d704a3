"""The control socket: status, stop and the like, answered by a thread that does nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import zmq

from deepinfer.daemon.second_address import bind_both
from deepinfer.daemon.setting import ConfigError
from deepinfer.stages import client_port
from deepinfer.stages import protocol_fields as fields
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.client_port import Delivery
from deepinfer.stages.curve import Curve
from deepinfer.stages.live import Route
from deepinfer.stages.protocol import Limits, ProtocolError, RequestId, decode_request, is_req
from deepinfer.stages.protocol_events import encode_error, encode_reply
from deepinfer.stages.protocol_fields import Parser
from deepinfer.stages.protocol_ops import Op
from deepinfer.stages.stage import Stage

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 4096
MAX_DRAIN_SECONDS = 7 * 24 * 3600


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    op: str
    id: RequestId | None = None
    now: bool = False
    """With `stop`: cut running requests instead of letting them finish."""
    seconds: int | None = None
    """With `drain`: how long running requests get."""


Action = Callable[[ControlRequest], Mapping[str, Any]]

FIELDS: dict[str, dict[str, Parser]] = {
    "status": {},
    "ping": {},
    "metrics": {},
    "stop": {"now": fields.boolean()},
    "drain": {"seconds": fields.integer(0, MAX_DRAIN_SECONDS)},
    "reload": {},
    "dump": {},
}
"""What each operation takes besides `v`, `op` and `id`."""

OPS = {name: Op(partial(ControlRequest, op=name), parsers) for name, parsers in FIELDS.items()}
LIMITS = Limits(max_frame_bytes=MAX_FRAME_BYTES)


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
            try:
                payload = self._answer(decode_request(frames, LIMITS, OPS))
            except ProtocolError as error:
                payload = encode_error(error)
            if client_port.send(socket, Route(identity, is_req(frames)).frames(payload)) is Delivery.SENT:
                self.progress += 1

    def _answer(self, request: ControlRequest) -> bytes:
        try:
            return encode_reply(request.op, request.id, self._actions[request.op](request))
        except ProtocolError:
            raise
        except ConfigError as error:
            raise ProtocolError("invalid_value", str(error), id=request.id) from error
        except Exception as error:
            # Whatever went wrong, the next call must be answered: without this socket nobody can stop the daemon.
            logger.exception("a fault while answering %s", request.op)
            raise ProtocolError("internal", f"{type(error).__name__}: {error}", id=request.id) from error
