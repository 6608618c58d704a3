"""The process that compiles kernels beside an engine that starts: `python -m deepinfer.daemon.second_compiler`.

An engine starts it before it imports torch, where kernels are missing and there is a core for it. It writes into the
cache on disk, from which the engine takes what it finds; where both want the same, one waits for the other. Whatever
becomes of it, the engine compiles what it lacks. Standard input carries the settings as one line of JSON; its end is
the end of this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from deepinfer.daemon.config import EngineConfig
from deepinfer.daemon.tether import die_with_parent
from deepinfer.kernels import kernel_cache
from deepinfer.stages.model.errors import ModelError
from deepinfer.stages.model.registry import find_here

logger = logging.getLogger(__name__)

ELSEWHERE = ("cuda", "host-emulation")
"""Devices that take none of the kernels."""
DRIVER = Path("/dev/nvidiactl")
"""Where it is, `auto` is most likely a GPU."""
KERNEL_SETTINGS = (
    *("model", "device", "dtype", "kv_cache_dtype", "kv_key_bias", "batch_invariant", "attention"),
    *("w4_prefill", "w4_activations"),
)
"""What decides which kernels a start calls for."""


class SecondCompiler:
    """Owned by the engine's main thread: one process at most, from `start` to `end`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """If that pays: not where an engine with these settings has started before, nor on one core."""
        threads = min(self._config.threads or 2, len(os.sched_getaffinity(0)))
        if threads < 2 or self._runs_elsewhere() or self._mark.exists():
            return
        model = find_here(self._config.model)
        if model is None:
            return
        logger.info("compiling kernels in a second process meanwhile")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deepinfer.daemon.second_compiler"], stdin=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            logger.warning("the second process could not be started: %s", error)
            return
        line = json.dumps([dataclasses.asdict(self._config), str(model)]).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # It died already, and `end` says so.
            self._process.stdin.write(line)  # type: ignore[union-attr]

    def _runs_elsewhere(self) -> bool:
        """As far as one can say without torch."""
        device = self._config.device
        return device in ELSEWHERE or (device == "auto" and DRIVER.exists())

    def end(self) -> None:
        """It is gone when this returns."""
        process, self._process = self._process, None
        if process is None:
            return
        code = process.poll()
        if code:
            logger.warning("the second process that compiles kernels ended with exit code %d", code)
        process.kill()
        process.wait()

    def note_start(self) -> None:
        """An engine with these settings has all its kernels."""
        with contextlib.suppress(FileExistsError):
            self._mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._mark.touch(mode=0o600, exist_ok=False)

    @property
    def _mark(self) -> Path:
        settings = repr([(name, getattr(self._config, name)) for name in KERNEL_SETTINGS])
        return kernel_cache.cpu_folder() / kernel_cache.STARTS / hashlib.sha256(settings.encode()).hexdigest()[:16]


def main() -> int:
    """Returns the exit code. A model or settings that cannot work are the engine's to refuse."""
    die_with_parent()
    settings, model = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_watch_engine, daemon=True).start()
    from deepinfer.daemon.foretold import needs_of
    from deepinfer.kernels.cpu.ahead import compile_ahead

    try:
        needs = needs_of(EngineConfig(**settings), Path(model))
    except (ModelError, ValueError):
        return 0
    gc.disable()  # It makes millions of objects that stay, and lives for seconds.
    compile_ahead(needs)
    return 0


def _watch_engine() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # The thread that reads standard input holds it.
