"""Who may connect to an encrypted socket: the ZAP handler, and the list that it asks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from deepinfer.daemon.config import ConfigError, DaemonConfig
from deepinfer.daemon.endpoints import is_open
from deepinfer.daemon.keys import KeyStore
from deepinfer.daemon.sources import config_folder
from deepinfer.stages.curve import ZAP_DOMAIN, Curve

logger = logging.getLogger(__name__)


def key_store(keys_dir: str | None) -> KeyStore:
    return KeyStore(Path(keys_dir) if keys_dir else config_folder() / "keys")


def curve_of(config: DaemonConfig) -> Curve | None:
    """The keys that the sockets of this configuration need; None when they need none.

    Raises ConfigError when keys, or clients that would be let in, are missing.
    """
    endpoints = (config.endpoint, config.control_endpoint, config.metrics_endpoint)
    opened = [endpoint for endpoint in endpoints if endpoint and is_open(endpoint)]
    if not opened and not config.curve:
        return None
    store = key_store(config.keys_dir)
    curve = store.server()
    reason = f"{opened[0]} is not a loopback address" if opened else "curve is on"
    if curve is None:
        raise ConfigError(
            f"{reason}, and there are no CURVE keys in {store.folder}: make them with `deepinfer-daemon keys new`, and "
            "let clients in with `deepinfer-daemon keys allow`"
        )
    if opened and not store.allowed():
        raise ConfigError(
            f"{reason}, and no client is allowed: let one in with `deepinfer-daemon keys allow NAME PUBLIC_KEY`"
        )
    return curve


class Gate:
    """Owned by the main thread. Made before the sockets that it guards are bound, closed after they are.

    Besides the listed clients it lets in whoever can read the connection file: that has a key pair of its own, which is
    made anew at every start.
    """

    def __init__(self, context: zmq.Context, curve: Curve, store: KeyStore) -> None:
        self.curve = curve
        self._store = store
        self._local_public, self._local_secret = zmq.curve_keypair()
        self._keys: frozenset[bytes] = frozenset()
        self.reload()
        self._handler = ThreadAuthenticator(context, log=logger)
        self._handler.start()
        self._handler.configure_curve_callback(ZAP_DOMAIN.decode(), self)

    def reload(self) -> int:
        """Reads the list again; how many clients are on it. Connections that exist go on. Raises ConfigError."""
        allowed = self._store.allowed()
        self._keys = frozenset(allowed.values()) | {self._local_public}
        return len(allowed)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the handler's thread."""
        known = key in self._keys
        if not known:
            logger.warning("refused a client with the unknown public key %s", key.decode())
        return known

    def connection(self) -> dict[str, Any]:
        """What a client of this user needs to be let in."""
        keys = {"server_key": self.curve.public, "public_key": self._local_public, "secret_key": self._local_secret}
        return {name: key.decode() for name, key in keys.items()}

    def close(self) -> None:
        self._handler.stop()
