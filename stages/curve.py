"""CURVE: what makes a socket encrypt, and know who is at the other end."""

from __future__ import annotations

from typing import NamedTuple

import zmq

ZAP_DOMAIN = b"deepinfer"


class Curve(NamedTuple):
    """The daemon's key pair, as Z85 text. Whoever binds a socket with it has a ZAP handler running before: without one,
    libzmq lets every key in."""

    public: bytes
    secret: bytes

    def secure(self, socket: zmq.Socket) -> None:
        """Everything that `socket` binds from now on is encrypted and asks the ZAP handler; what it has bound stays."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
