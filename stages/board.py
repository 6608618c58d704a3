"""What the front process knows of itself: written by admission, read by the supervisor and the control thread."""

from __future__ import annotations

import threading
from typing import Any


class StatusBoard:
    """Values are replaced as a whole, never changed in place, so a reader in another thread needs no lock."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.phase = "loading"
        """loading, ready, draining, failed or stopped."""
        self.progress: tuple[str, int, int] = ("starting the engine", 0, 0)
        self.summary: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.stats_at = 0.0
        self.front: dict[str, int] = {}
        self.error = ""
        self.config_error = False
        self.changed = threading.Event()

    def set_phase(self, phase: str) -> None:
        self.phase = phase
        self.changed.set()

    def fail(self, error: str, config_error: bool = False) -> None:
        self.error = error
        self.config_error = config_error
        self.set_phase("failed")

    def status(self) -> dict[str, Any]:
        """What `status` answers, on the client socket and on the control socket alike."""
        stats = self.stats
        return {
            **self.info,
            "phase": self.phase,
            "error": self.error,
            "engine": self.summary,
            "requests": {**self.front, **stats.get("states", {})},
            "swapped": stats.get("swapped_requests", 0),
            "blocks": {"total": stats.get("num_blocks", 0), "free": stats.get("free_blocks", 0)},
            "cpu_offload": {
                "enabled": self.summary.get("cpu_offload_enabled", False),
                "payload_bytes": stats.get("cpu_offload_bytes", 0),
                "budget_bytes": self.summary.get("cpu_offload_budget_bytes", 0),
                "max_swapped_requests": stats.get("max_swapped_requests", 0),
            },
            "counters": {name: value for name, value in stats.items() if name.endswith(("_total", "_seconds"))},
        }
