"""CURVE keys as a client uses them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.auth
from zmq.utils import z85

from deepinfer.clients.errors import AccessDeniedError, InvalidRequestError

if TYPE_CHECKING:
    from deepinfer.clients.discovery import Connection


def read_keys(server_key: str | None, key_file: str | os.PathLike[str] | None) -> dict[str, str]:
    """`server_key`: 40 characters of Z85. `key_file`: NAME.key_secret. Raises InvalidRequestError."""
    if server_key is None or key_file is None:
        raise InvalidRequestError("conflict", "server_key and key_file go together", field="server_key")
    _check("server_key", server_key)
    path = Path(key_file)
    try:
        if sys.platform != "win32" and path.stat().st_mode & 0o077:
            raise InvalidRequestError("invalid_value", f"key_file: others can read {path}; its mode must be 0600")
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise InvalidRequestError("invalid_value", f"key_file: {path} cannot be read as a key: {error}") from error
    if secret is None:
        raise InvalidRequestError("invalid_value", f"key_file: {path} holds no secret key", field="key_file")
    keys = {"server_key": server_key, "public_key": public.decode(), "secret_key": secret.decode()}
    for key in keys.values():
        _check("key_file", key)
    return keys


def use_keys(socket: zmq.Socket, keys: Mapping[str, str]) -> None:
    """Before connect."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys["server_key"].encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys["public_key"].encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys["secret_key"].encode())


def denied(connection: Connection) -> AccessDeniedError:
    if connection.curve is None:
        hint = "it wants CURVE keys: give server_key and key_file, or the connection file"
    else:
        hint = f"the key {connection.curve['public_key']} is not allowed there, or nothing is encrypted"
    return AccessDeniedError(f"the daemon at {connection.endpoint} does not let this client in: {hint}")


def _check(field: str, key: str) -> None:
    try:
        if len(key) == 40 and len(z85.decode(key)) == 32:
            return
    except (KeyError, ValueError):
        pass
    raise InvalidRequestError("invalid_value", f"{field}: a key is 40 characters of Z85", field=field)
