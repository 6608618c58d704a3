"""What decode knows of the host: the bytes that are there, what is on its way back, and who computed meanwhile."""

from __future__ import annotations

from deepinfer.stages.messages import SwapInDone, SwapOutDone
from deepinfer.stages.stats import EngineCounters


class Transfers:
    """Owned by decode; it counts transfers as they are answered.

    Every return is a prefetch: the copy runs while others compute, and a running request is never moved for it. It was
    a hit when others did compute meanwhile, and a miss when the engine had nothing to do but wait for it.
    """

    def __init__(self, counters: EngineCounters, block_bytes: int) -> None:
        self._counters = counters
        self._block_bytes = block_bytes
        self._payloads: dict[int, int] = {}
        """Bytes on the host, by request."""
        self._returning: dict[int, int] = {}
        """What `_begun` was when the copy back was asked for, by request."""
        self._begun = 0

    @property
    def bytes(self) -> int:
        return sum(self._payloads.values())

    def computing(self) -> None:
        """A decode step or a prefill chunk begins."""
        self._begun += 1

    def holds(self, rid: int) -> bool:
        """Whether anything of the request is on the host."""
        return rid in self._payloads

    def out(self, message: SwapOutDone) -> None:
        counters = self._counters
        counters.swapped_out(message, self._block_bytes)
        if message.error:
            return
        counters.requests_swapped_total += message.rid not in self._payloads
        self._payloads[message.rid] = self._payloads.get(message.rid, 0) + message.bytes
        counters.max_swapped_requests = max(counters.max_swapped_requests, len(self._payloads))
        counters.max_cpu_offload_bytes = max(counters.max_cpu_offload_bytes, self.bytes)

    def returning(self, rid: int, computing: bool) -> None:
        """A SwapIn is sent. `computing`: a prefill chunk is out already."""
        self._returning[rid] = self._begun - computing

    def back(self, message: SwapInDone, alive: bool) -> None:
        """`alive`: the request still wants it."""
        counters = self._counters
        counters.swapped_in(message, self._block_bytes)
        self.dropped(message.rid)
        hidden = self._begun > self._returning.pop(message.rid)
        if message.error:
            return
        counters.prefetch_cancelled_total += not alive
        counters.prefetch_hits_total += alive and hidden
        counters.prefetch_misses_total += alive and not hidden

    def dropped(self, rid: int) -> None:
        self._payloads.pop(rid, None)
