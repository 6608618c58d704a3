"""What the engine says of itself in a Snapshot. It imports the model; `stats`, which the front reads too, does not."""

from __future__ import annotations

from typing import Any

from deepinfer.stages.memory.entries import State
from deepinfer.stages.memory.residency import Residency
from deepinfer.stages.model.executor import Executor
from deepinfer.stages.stats import EngineCounters


def engine_stats(counters: EngineCounters, residency: Residency, executor: Executor) -> dict[str, Any]:
    """What a Snapshot says of counters, requests by state, blocks, encoders and captured steps."""
    states = dict.fromkeys((state.value for state in State), 0)
    for entry in residency.entries.values():
        states[entry.state.value] += 1
    kv_counts = executor.attention.kv_counts()
    graphs, ledger = executor.graphs, residency.ledger
    return {
        **counters.as_dict(),
        "kv_saturated_total": sum(saturated for saturated, _ in kv_counts),
        "kv_nonfinite_total": sum(nonfinite for _, nonfinite in kv_counts),
        "kv_encoder_layers": [[layer, *counts] for layer, counts in enumerate(kv_counts) if any(counts)],
        "cuda_graphs_captured_total": 0 if graphs is None else len(graphs.captured),
        "cuda_graph_replays_total": 0 if graphs is None else graphs.replays,
        "states": states,
        "num_blocks": ledger.num_rows // ledger.rows_per_block,
        "free_blocks": ledger.available // ledger.rows_per_block,
        "cached_blocks": ledger.idle // ledger.rows_per_block,
        "swapped_requests": states["swapped"],
    }
