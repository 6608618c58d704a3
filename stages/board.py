"""What the front process knows of itself: written by admission, read by the supervisor and the control thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

FINAL = ("failed", "stopped")


class StatusBoard:
    """Values are replaced as a whole, never changed in place, so a reader in another thread needs no lock."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.phase = "loading"
        """loading, ready, restarting, draining, failed or stopped."""
        self.progress: tuple[str, int, int] = ("starting the engine", 0, 0)
        self.summary: dict[str, Any] = {}
        self.limits: dict[str, int] = {}
        self.stats: dict[str, Any] = {}
        self.front: dict[str, int] = {}
        self.ready_pid = 0
        """The last engine process that was ready."""
        self.turns = 0
        """Of admission."""
        self.heartbeat: tuple[float, dict[str, tuple[bool, int]]] = (0.0, {})
        """When the last one came, and what it said."""
        self.health: dict[str, dict[str, Any]] = {}
        """By stage; written by the watchdog."""
        self.hung = ""
        """What has stood still for too long."""
        self.advances = 0
        """Tokens that engines have produced, and requests that were found to kill them: what a restart is good for."""
        self.engine_deaths = 0
        self.last_engine_death = ""
        self._dead_engines: dict[str, Any] = {}
        """Totals of engines that are gone."""
        self.error = ""
        self.config_error = False
        self.changed = threading.Event()
        self.on_phase: Callable[[str], None] = lambda phase: None
        """Called with each new phase, by the thread that set it."""

    @property
    def over(self) -> bool:
        return self.phase in FINAL

    def set_phase(self, phase: str) -> None:
        """A final phase is never left."""
        if not self.over and phase != self.phase:
            self.phase = phase
            self.on_phase(phase)
        self.changed.set()

    def fail(self, error: str, config_error: bool = False) -> None:
        if not self.over:
            self.error = error
            self.config_error = config_error
        self.set_phase("failed")

    def engine_says(self, stats: dict[str, Any]) -> None:
        """Totals go on over a restart, as far as the dead engine had told them."""
        self.stats = {
            name: value + self._dead_engines.get(name, 0) if _is_total(name) else value for name, value in stats.items()
        }

    def engine_died(self, error: str) -> None:
        self.engine_deaths += 1
        self.last_engine_death = error
        self._dead_engines = {name: value for name, value in self.stats.items() if _is_total(name)}
        self.stats = dict(self._dead_engines)

    def engine_up(self) -> bool:
        return self.phase in ("ready", "draining") and not self.hung

    def status(self) -> dict[str, Any]:
        """What `status` answers, on the client socket and on the control socket alike."""
        stats = self.stats
        return {
            **self.info,
            "phase": "hung" if self.hung and not self.over else self.phase,
            "hung": self.hung,
            "health": self.health,
            "limits": self.limits,
            "error": self.error,
            "engine_deaths": self.engine_deaths,
            "last_engine_death": self.last_engine_death,
            "engine": self.summary,
            "requests": {**self.front, **stats.get("states", {})},
            "swapped": stats.get("swapped_requests", 0),
            "blocks": {
                "total": stats.get("num_blocks", 0),
                "free": stats.get("free_blocks", 0),
                "cached": stats.get("cached_blocks", 0),
            },
            "cpu_offload": {
                "enabled": self.summary.get("cpu_offload_enabled", False),
                "payload_bytes": stats.get("cpu_offload_bytes", 0),
                "max_payload_bytes": stats.get("max_cpu_offload_bytes", 0),
                "budget_bytes": self.summary.get("cpu_offload_budget_bytes", 0),
                "max_swapped_requests": stats.get("max_swapped_requests", 0),
            },
            "preemption": stats.get("preemption", {}),
            "kv_encoder_layers": [
                {"layer": layer, "saturated": saturated, "nonfinite": nonfinite}
                for layer, saturated, nonfinite in stats.get("kv_encoder_layers", [])
            ],
            "counters": {name: value for name, value in stats.items() if _is_total(name)},
        }


def _is_total(name: str) -> bool:
    return name.endswith(("_total", "_seconds"))
