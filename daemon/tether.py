"""What a child process asks of the kernel, so that it never outlives its parent."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends: unlike the end of standard input, that
    also reaches a process that is stopped. Only Linux has it; elsewhere a stopped child lives until it goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
