"""How much memory a forward pass takes beside weights and the KV pool, computed before anything is allocated."""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.kernels.cuda.decode_plan import workspace_bytes, workspace_floats
from deepinfer.kernels.cuda.linear import WORKSPACE_BYTES
from deepinfer.kernels.cuda.prefill_plan import FEWEST_ROWS, most_prefill_partitions
from deepinfer.stages.model.config import ModelConfig
from deepinfer.stages.model.executor import KEPT_ROWS

LIBRARY_BYTES = 32 << 20
"""What the matmul library of a GPU takes for itself: cuBLAS 8 MiB, from sm_90 on 32."""


class Passes(NamedTuple):
    """The passes of an engine on CUDA: at most one prefill chunk and one decode step at a time."""

    chunk: int
    """Rows."""
    step: int
    """Rows, each of a request of its own."""
    context: int
    batch_invariant: bool
    captured: bool
    """Decode steps are graphs, whose memory is counted as theirs."""


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


def scratch_bytes(config: ModelConfig, rows: int, context: int, passes: Passes | None) -> int:
    """What attention needs beside its inputs for `rows` rows at the end of a context of that many tokens, RoPE tables
    included. `passes`: on CUDA."""
    tables = 4 * config.head_dim * context * len(config.distinct_ropes)
    if passes is None:
        return tables + 4 * rows * (config.q_size + config.head_dim)
    libraries = LIBRARY_BYTES + WORKSPACE_BYTES
    return tables + libraries + chunk_workspace(config, passes) + step_workspace(config, passes)


def chunk_workspace(config: ModelConfig, passes: Passes) -> int:
    """What attention needs for a prefill chunk: rows in tiles, whose contexts are cut into few partitions, or rows one
    by one, in many. Not batch-invariant, few rows of each request are attended one by one."""
    heads, dim, one_by_one = config.num_q_heads, config.head_dim, passes.chunk
    in_tiles = 0
    if not passes.batch_invariant:
        in_tiles = 4 * workspace_floats(passes.chunk, heads, dim, most_prefill_partitions(passes.context))
        few = max(1, (FEWEST_ROWS - 1) * config.num_kv_heads // heads)
        one_by_one = min(passes.chunk, few * passes.step)
    return max(in_tiles, workspace_bytes(one_by_one, heads, dim, _visible(config, passes.context)))


def step_workspace(config: ModelConfig, passes: Passes) -> int:
    """The same for a decode step that is not captured."""
    if passes.captured:
        return 0
    return workspace_bytes(passes.step, config.num_q_heads, config.head_dim, _visible(config, passes.context))


def graph_bytes(config: ModelConfig, itemsize: int, max_rows: int, max_context: int) -> int:
    """Captured decode steps. All of them share one workspace of attention, as large as the largest needs, the logits,
    and the memory of a pass."""
    workspace = workspace_bytes(max_rows, config.num_q_heads, config.head_dim, _visible(config, max_context))
    return workspace + 4 * max_rows * config.vocab_size + pass_bytes(config, itemsize, max_rows, max_rows)


def _visible(config: ModelConfig, context: int) -> int:
    """Tokens that the widest layer sees of a context."""
    return max(min(context, window) if window else context for window in config.windows)
