"""How much memory a forward pass takes beside weights and the KV pool, computed before anything is allocated."""

from __future__ import annotations

from deepinfer.kernels.cuda.decode_plan import workspace_bytes
from deepinfer.kernels.cuda.linear import WORKSPACE_BYTES
from deepinfer.stages.model.config import ModelConfig
from deepinfer.stages.model.executor import KEPT_ROWS
from deepinfer.stages.model.step_graphs import SMALLEST_CONTEXT, doublings

LIBRARY_BYTES = 32 << 20
"""What the matmul library of a GPU takes for itself: cuBLAS 8 MiB, from sm_90 on 32."""


def activation_bytes(config: ModelConfig, itemsize: int, rows: int, sampled: int) -> int:
    """Of a pass over `rows` rows of which `sampled` get logits, at most, and the buffers that the executor keeps for
    steps of up to `sampled` rows. `itemsize`: bytes of the compute dtype."""
    kept = min(KEPT_ROWS, sampled)
    return pass_bytes(config, itemsize, rows, sampled) + _buffer_bytes(config, itemsize) * kept * (kept + 1) // 2


def pass_bytes(config: ModelConfig, itemsize: int, rows: int, sampled: int) -> int:
    """All that `Executor.forward` may hold at once."""
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = itemsize * (config.q_size + 2 * config.kv_size)
    residual, outputs = 4 * hidden, itemsize * (2 * hidden + 2 * inner)
    logits = sampled * (config.vocab_size * (4 + itemsize) + hidden * (4 + 2 * itemsize))
    return rows * (residual + _buffer_bytes(config, itemsize) + qkv + outputs) + logits


def _buffer_bytes(config: ModelConfig, itemsize: int) -> int:
    return itemsize * (config.hidden_size + config.q_size + config.intermediate_size)


def scratch_bytes(config: ModelConfig, rows: int, context: int, cuda: bool) -> int:
    """What attention needs beside its inputs for `rows` rows at the end of a context of that many tokens, RoPE tables
    included."""
    tables = 4 * config.head_dim * context * len(config.distinct_ropes)
    if not cuda:
        return tables + 4 * rows * (config.q_size + config.head_dim)
    libraries = LIBRARY_BYTES + WORKSPACE_BYTES
    return tables + libraries + workspace_bytes(rows, config.num_q_heads, config.head_dim, _visible(config, context))


def graph_bytes(config: ModelConfig, itemsize: int, max_rows: int, max_context: int) -> int:
    """Captured decode steps of every bucket: what their attention needs is theirs for good; logits and the memory of a
    pass are shared by all of them."""
    workspaces = sum(
        workspace_bytes(rows, config.num_q_heads, config.head_dim, _visible(config, context))
        for rows in doublings(1, max_rows)
        for context in doublings(SMALLEST_CONTEXT, max_context)
    )
    return workspaces + 4 * max_rows * config.vocab_size + pass_bytes(config, itemsize, max_rows, max_rows)


def _visible(config: ModelConfig, context: int) -> int:
    """Tokens that the widest layer sees of a context."""
    return max(min(context, window) if window else context for window in config.windows)
