"""Tells a service manager how the daemon is, by the protocol of sd_notify: datagrams to the socket it names."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping


class ServiceManager:
    """Does nothing where there is none. A message that cannot be sent is lost: the daemon does not depend on it."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Takes the variables out of `environ`, so that children do not speak for us."""
        address = environ.pop("NOTIFY_SOCKET", "")
        interval = environ.pop("WATCHDOG_USEC", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._ping_every = int(interval) / 2e6 if interval.isdigit() else None
        self._next_ping = 0.0
        self._said = ""

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Once, however often it is called."""
        if self._said != "stopping":
            self._said = "stopping"
            self._send("STOPPING=1")

    def reloading(self) -> None:
        """`ready` must follow."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def alive(self) -> None:
        """To be called often while all is well; the service manager hears of it as often as it asked for."""
        now = time.monotonic()
        if self._ping_every is not None and now >= self._next_ping:
            self._next_ping = now + self._ping_every
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
            datagram.setblocking(False)  # One that does not read must not hold us up.
            datagram.sendto(message.encode(), self._address)
