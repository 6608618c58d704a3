"""Memory that is free again goes back to the system, where the C library would keep it."""

from __future__ import annotations

import logging

import psutil

from deepinfer.stages.heap import trim_heap

logger = logging.getLogger(__name__)

SOON_SECONDS, LATE_SECONDS = 2.0, 256.0
GROWTH_BYTES = 8 << 20
"""Less is not worth a trim."""


class Heap:
    """Of this process, looked at by one thread. A message of very many frames takes hundreds of MiB in as many pieces;
    glibc gives pieces between others that are still in use back only when it is told to.

    `resident` is what the process has when nothing is wrong. While it has more, it is trimmed; after one in vain the
    next one comes after twice as long, because what is in use may be in use for long.
    """

    def __init__(self, resident: int, now: float) -> None:
        self._resident = resident
        self._pause = SOON_SECONDS
        self._next = now + self._pause

    def look(self, now: float) -> None:
        """At most every two seconds anything is done, so it may be called as often as one likes."""
        if now < self._next:
            return
        before = resident_bytes()
        if before <= self._resident + GROWTH_BYTES:
            self._pause = SOON_SECONDS
        elif not trim_heap():
            self._pause = LATE_SECONDS
        else:
            given = before - resident_bytes()
            logger.debug("gave %.1f MiB back to the system", given / 2**20)
            self._pause = SOON_SECONDS if given >= GROWTH_BYTES else min(2 * self._pause, LATE_SECONDS)
        self._next = now + self._pause


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss
