"""How fast blocks are copied beside decode steps that want the same cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from deepinfer.stages.clock import monotonic

SHARE = 0.06
"""Of a core's time that copies take while steps run: a step that cannot go on without that core is so much slower."""
SLICE_BYTES = 1 << 20
"""Copied between two pauses: a thread that computes is put aside for a tenth of a millisecond, not for a whole swap."""
FREE_SLICE_BYTES = 16 << 20
"""Copied at a time while no step runs: one may begin."""


class Pace:
    """Decode says whether it steps; the offload stage asks how much to copy next, waits, and says what it took.

    What a slice took is CPU time: while a copy waits for memory, or is put aside by the system, it is in nobody's way.
    With a share of 1 (a device that copies while it computes) there are no slices and no pauses.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._free = threading.Event()
        self._free.set()
        self._next = 0.0
        """When the next slice may be copied beside steps."""

    # --- decode's ---------------------------------------------------------------------------------------------

    def steps(self, running: bool) -> None:
        """Whether a step comes now. When none does, whoever waits goes on at once."""
        if running == self._free.is_set():
            (self._free.clear if running else self._free.set)()

    # --- the offload stage's ----------------------------------------------------------------------------------

    def slices(self, rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """(first, count) of slices of `rows` neighbouring rows, each when it may be copied. At least a row each."""
        first = 0
        while first < rows:
            most = rows
            if self._share < 1:
                free = self._free.wait(max(0.0, self._next - monotonic()))
                most = max(1, (FREE_SLICE_BYTES if free else SLICE_BYTES) // row_bytes)
            count = min(rows - first, most)
            yield first, count
            first += count

    def took(self, cpu_seconds: float) -> None:
        """The last slice."""
        self._next = monotonic() + cpu_seconds * (1 / self._share - 1)
