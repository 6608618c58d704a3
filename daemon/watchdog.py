"""Which stage has work and does not move. No threads, no clock, no sockets: it is told what time it is."""

from __future__ import annotations

from typing import Any

Pulses = dict[str, tuple[bool, int]]
"""For each thread of the engine: whether it has work, and its progress."""

ADMISSION, PROCESS = "admission", "engine process"
WAITS_FOR = {"compute": (), "prefill": ("compute",), "offload": (), "decode": ("compute", "prefill", "offload")}
"""In the order in which they are to be blamed. A stage stands still only while those that it may wait for do, too: a
long prefill chunk moves the compute thread from layer to layer."""
LONGEST_LOOK_S = 1.0
"""What one look counts at most: time in which nobody watched, because the front was suspended, proves nothing."""


class Watchdog:
    """For one engine. Heartbeats come through admission, so the time in which admission did not turn does not count
    against the engine."""

    def __init__(self, bound_s: float, now: float) -> None:
        self._bound_s = bound_s
        self._looked_at = now
        self._turns = -1
        self._stamp = 0.0
        self._pulses: Pulses = {}
        self._stood: dict[str, float] = {ADMISSION: 0.0}
        """Seconds without movement, by stage."""

    def look(self, now: float, turns: int, stamp: float, pulses: Pulses) -> None:
        """`turns`: of admission. `stamp`: when the last heartbeat came, and `pulses` what it said."""
        passed = min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        if turns == self._turns:
            self._stood[ADMISSION] += passed
            return
        self._turns = turns
        self._stood[ADMISSION] = 0.0
        for name in (PROCESS, *WAITS_FOR):
            self._stood[name] = self._stood.get(name, 0.0) + passed
        if stamp != self._stamp:
            self._stamp = stamp
            self._stood[PROCESS] = 0.0
            self._note_movement(pulses)

    def _note_movement(self, pulses: Pulses) -> None:
        moved = {name for name, (_, progress) in pulses.items() if self._pulses.get(name, (False, -1))[1] != progress}
        for name, waits_for in WAITS_FOR.items():
            working = pulses.get(name, (False, 0))[0]
            if not working or name in moved or not moved.isdisjoint(waits_for):
                self._stood[name] = 0.0
        self._pulses = pulses

    def stalled(self, share: float = 1.0) -> str:
        """What has stood still for that share of the bound; empty when nothing has. If several have, the one that the
        others wait for."""
        names = (ADMISSION, PROCESS, *WAITS_FOR)
        return next((name for name in names if self._stood.get(name, 0.0) >= share * self._bound_s), "")

    def report(self) -> dict[str, dict[str, Any]]:
        """For `status`."""
        health: dict[str, dict[str, Any]] = {}
        for name, seconds in self._stood.items():
            health[name] = {"still_s": round(seconds, 1)}
            if name in self._pulses:
                working, progress = self._pulses[name]
                health[name] |= {"working": working, "progress": progress}
        return health
