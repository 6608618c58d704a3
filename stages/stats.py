"""What the engine counts. One plain object, owned by decode; a copy of it goes out in every Snapshot."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from deepinfer.stages.messages import SwapInDone, SwapOutDone


@dataclass
class EngineCounters:
    """Totals since start. Names ending in `_seconds` are sums of seconds."""

    requests_finished_total: int = 0
    requests_failed_total: int = 0
    generation_tokens_total: int = 0
    prompt_tokens_total: int = 0
    prefix_cache_queries_total: int = 0
    """Tokens of newly admitted requests that were looked up in the prefix tree, and how many were found stored."""
    prefix_cache_hits_total: int = 0
    replayed_tokens_total: int = 0
    """Computed again after a preemption without swap; in none of the above."""
    decode_steps_total: int = 0
    decode_seconds: float = 0.0
    prefill_chunks_total: int = 0
    prefill_seconds: float = 0.0
    requests_swapped_total: int = 0
    requests_resumed_total: int = 0
    requests_recomputed_total: int = 0
    requests_kv_exhausted_total: int = 0
    kv_cpu_offload_blocks_total: int = 0
    kv_cpu_offload_bytes_total: int = 0
    kv_cpu_offload_copies_total: int = 0
    kv_cpu_offload_failed_total: int = 0
    kv_cpu_offload_rejected_total: int = 0
    kv_cpu_reload_blocks_total: int = 0
    kv_cpu_reload_bytes_total: int = 0
    kv_cpu_reload_copies_total: int = 0
    cpu_offload_seconds: float = 0.0
    cpu_reload_seconds: float = 0.0
    prefetch_hits_total: int = 0
    """Copies back that were hidden behind what others computed; the engine waited for those that missed, and those that
    were cancelled came for a request that had ended."""
    prefetch_misses_total: int = 0
    prefetch_cancelled_total: int = 0
    max_swapped_requests: int = 0
    max_cpu_offload_bytes: int = 0
    """Most that was in host memory at the same time."""

    def computed(self, new: int, count: int) -> None:
        """`count` tokens of a prefill chunk, `new` of them for the first time."""
        self.prompt_tokens_total += new
        self.replayed_tokens_total += count - new

    @property
    def prefill_tokens(self) -> int:
        """All that prefill has computed, also what it computed again."""
        return self.prompt_tokens_total + self.replayed_tokens_total

    def swapped_out(self, message: SwapOutDone, block_bytes: int) -> None:
        """A swap out was answered: done, rejected by the budget, or failed."""
        if message.error:
            self.kv_cpu_offload_rejected_total += message.rejected
            self.kv_cpu_offload_failed_total += not message.rejected
            return
        self.kv_cpu_offload_blocks_total += message.bytes // block_bytes
        self.kv_cpu_offload_bytes_total += message.bytes
        self.kv_cpu_offload_copies_total += message.copies
        self.cpu_offload_seconds += message.seconds

    def swapped_in(self, message: SwapInDone, block_bytes: int) -> None:
        if message.error:
            self.kv_cpu_offload_failed_total += 1
            return
        self.kv_cpu_reload_blocks_total += message.bytes // block_bytes
        self.kv_cpu_reload_bytes_total += message.bytes
        self.kv_cpu_reload_copies_total += message.copies
        self.cpu_reload_seconds += message.seconds

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)
