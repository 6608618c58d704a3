"""What the engine counts. One plain object, owned by decode; a copy of it goes out in every Snapshot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer.stages.messages import SwapInDone, SwapOutDone


def count(help: str, zero: int | float = 0) -> Any:
    """A counter; every one is a Prometheus metric, and `help` its description there and in docs/metrics.md."""
    return field(default=zero, metadata={"help": help})


@dataclass
class EngineCounters:
    """Totals since the engine started. Names ending in `_seconds` are sums of seconds."""

    requests_finished_total: int = count("Requests that ended, for whatever reason.")
    requests_failed_total: int = count("Requests that ended with an error.")
    generation_tokens_total: int = count("Tokens generated.")
    prompt_tokens_total: int = count("Prompt tokens computed for the first time; not those found in the prefix cache.")
    prefix_cache_queries_total: int = count(
        "Tokens of newly admitted requests that were looked up in the prefix cache."
    )
    prefix_cache_hits_total: int = count("Of these, those that were found stored.")
    replayed_tokens_total: int = count(
        "Tokens computed again after a preemption without swap; in no other token counter."
    )
    requests_forked_total: int = count("Requests that began on the stored prompt of another choice.")
    kv_copied_blocks_total: int = count("KV blocks copied because choices that shared them would have written there.")
    decode_steps_total: int = count("Decode steps, each over every resident request.")
    decode_context_tokens_total: int = count("Stored tokens that decode steps read, summed over requests and steps.")
    decode_seconds: float = count("Seconds spent in decode steps.", 0.0)
    prefill_chunks_total: int = count("Prefill chunks computed.")
    prefill_seconds: float = count("Seconds spent in prefill chunks.", 0.0)
    requests_swapped_total: int = count("Requests moved out to host memory.")
    requests_resumed_total: int = count("Requests that came back from host memory.")
    requests_recomputed_total: int = count(
        "Requests computed again: they lost their blocks without a swap, or did not come back."
    )
    requests_kv_exhausted_total: int = count("Requests that ended because the pool could not hold them even alone.")
    kv_cpu_offload_blocks_total: int = count("KV blocks copied to host memory.")
    kv_cpu_offload_bytes_total: int = count("Bytes copied to host memory.")
    kv_cpu_offload_copies_total: int = count("Copies to host memory; neighbouring blocks go in one.")
    kv_cpu_offload_failed_total: int = count("Copies to or from host memory that failed.")
    kv_cpu_offload_rejected_total: int = count("Swaps that the byte budget refused.")
    kv_cpu_reload_blocks_total: int = count("KV blocks copied back from host memory.")
    kv_cpu_reload_bytes_total: int = count("Bytes copied back from host memory.")
    kv_cpu_reload_copies_total: int = count("Copies back from host memory.")
    cpu_offload_seconds: float = count(
        "Seconds that copies to host memory took, with their pauses beside decode steps.", 0.0
    )
    cpu_reload_seconds: float = count(
        "Seconds that copies back from host memory took, with their pauses beside decode steps.", 0.0
    )
    prefetch_hits_total: int = count("Copies back that were hidden behind what others computed.")
    prefetch_misses_total: int = count("Copies back that the engine waited for.")
    prefetch_cancelled_total: int = count("Copies back for requests that had ended meanwhile.")
    max_swapped_requests: int = count("Most requests that were in host memory at the same time.")
    max_cpu_offload_bytes: int = count("Most bytes that were in host memory at the same time.")

    def computed(self, new: int, count: int) -> None:
        """`count` tokens of a prefill chunk, `new` of them for the first time."""
        self.prompt_tokens_total += new
        self.replayed_tokens_total += count - new

    def decoded(self, context_tokens: int, seconds: float) -> None:
        """A decode step over requests that have `context_tokens` stored tokens together."""
        self.decode_steps_total += 1
        self.decode_context_tokens_total += context_tokens
        self.decode_seconds += seconds

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
