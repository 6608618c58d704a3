"""A socket that listens for this user in the runtime folder, and if it was asked to, elsewhere too."""

from __future__ import annotations

import zmq

from deepinfer.stages.admission import EndpointError
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.curve import Curve


def bind_both(
    socket: zmq.Socket, address: str, setting: str, second: str | None, curve: Curve | None, board: StatusBoard
) -> None:
    """`address` lies in the private runtime folder and has no keys; `second` has, if there is a `curve`, and the board
    shows it by the name of its `setting`. Raises EndpointError."""
    socket.bind(address)
    if second is None:
        return
    if curve is not None:
        curve.secure(socket)
    try:
        socket.bind(second)
    except zmq.ZMQError as error:
        raise EndpointError(f"{setting}: cannot listen on {second}: {error.strerror}") from error
    board.info[setting] = socket.getsockopt_string(zmq.LAST_ENDPOINT)
