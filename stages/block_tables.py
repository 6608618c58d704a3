"""Block tables of requests: copies of what the ledger says, refreshed before anyone is told to use them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deepinfer.stages.memory.residency import Residency
from deepinfer.stages.request import Request


class BlockTables:
    """Owned by decode. A table is written only while no step and no chunk that names its request is under way.
    `num_blocks` 0 says of a table that the ledger's has changed."""

    def __init__(self, requests: Mapping[int, Request], residency: Residency) -> None:
        self._requests = requests
        self._residency = residency
        self._ledger = residency.ledger

    def outdated(self, rid: int) -> None:
        """Its blocks are others now, even if they are as many."""
        self._requests[rid].num_blocks = 0

    def refresh(self, rid: int) -> None:
        """Before the request is computed."""
        request = self._requests[rid]
        length = self._ledger.length(rid)
        if request.num_blocks != length:
            # Places that are past: no row looks there, but every id must be one.
            np.maximum(self._ledger.tables(rid), 0, out=request.table[:, :length])
            request.num_blocks = length

    def register_filled(self, rid: int) -> None:
        """Tell the prefix tree of blocks that have become full, after the step or chunk that filled them. Where it
        knows an equal block, the request gets that one."""
        indices = self._residency.unregistered(rid)
        if not indices:
            return
        request, entry = self._requests[rid], self._residency.entries[rid]
        if len(entry.keys) < indices.stop:
            entry.keys.extend(request.keys(entry.keys))
        for index in indices:
            if self._residency.filled(rid, index):
                self.outdated(rid)
