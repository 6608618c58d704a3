"""What every thread of this process is doing: for `dump`, and for SIGUSR1."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import traceback


def dump_on_signal() -> None:
    """SIGUSR1 writes all stacks to standard error, also of a process whose interpreter is stuck in a kernel."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True, chain=False)


def all_stacks() -> str:
    """Of this process, by the names of its threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
