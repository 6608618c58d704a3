"""How long OpenMP threads wait by spinning. Imports nothing, because it must run before torch is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPINS = "20000"
"""Some tens of microseconds: enough between two kernels of a layer, which Python calls one after the other."""


def limit_spinning(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Let idle OpenMP threads sleep soon instead of spinning for milliseconds.

    Torch and numba each bring a pool of threads. When other programs share the cores, a spinning thread of
    one keeps the core from the thread that everybody waits for, and a decode step of 20 ms was seen to take a
    second. On idle cores it costs nothing measurable. What the user has set stays. Returns whether the
    setting is in time: False if torch is loaded already, for then only child processes see it.
    """
    if not any(name in environ for name in SPIN_VARIABLES):
        environ["GOMP_SPINCOUNT"] = SPINS
    return "torch" not in sys.modules
