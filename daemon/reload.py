"""`reload`: takes over what may change while the daemon runs, and says what needs a restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from deepinfer.daemon.config import DaemonConfig
from deepinfer.daemon.gate import Gate
from deepinfer.daemon.log import set_level
from deepinfer.daemon.setting import settings_of

logger = logging.getLogger(__name__)


class Reloader:
    """Called by the control thread or, after SIGHUP, by the main thread. `read` looks at flags, environment and file
    again; `apply` is given the new configuration when a live setting has changed."""

    def __init__(
        self,
        config: DaemonConfig,
        read: Callable[[], DaemonConfig],
        gate: Gate | None,
        apply: Callable[[DaemonConfig], None],
    ) -> None:
        self._config = config
        self._read, self._gate, self._apply = read, gate, apply
        self._lock = threading.Lock()

    def reload(self) -> dict[str, Any]:
        """What has changed now, what would with a restart, and how many clients are allowed. Raises ConfigError; then
        nothing has changed."""
        with self._lock:
            return self._reload()

    def _reload(self) -> dict[str, Any]:
        wished = self._read()
        allowed = None if self._gate is None else self._gate.reload()
        before, after = asdict(self._config), asdict(wished)
        different = [name for name in after if after[name] != before[name]]
        live = {name for name, field in settings_of(DaemonConfig).items() if field.metadata["live"]}
        changed = {name: after[name] for name in different if name in live}
        if changed:
            self._config = DaemonConfig(**{**before, **changed})
            set_level(self._config.log_level)
            self._apply(self._config)
        report = {
            "changed": changed,
            "needs_restart": [name for name in different if name not in live],
            "allowed_clients": allowed,
        }
        logger.info("reloaded", extra={"fields": report})
        return report
