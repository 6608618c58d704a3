"""What an engine takes of the memory at hand, before a weight is read. The plan is authoritative: what it grants is
what is allocated, and what cannot fit is refused with the arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.daemon.config import ConfigError, EngineConfig
from deepinfer.daemon.target import Target
from deepinfer.kernels import BlockLayout, KVFormat, resolve_kv_format
from deepinfer.stages.memory.entries import idle_chunks
from deepinfer.stages.memory.layer_groups import LayerGroups, group_layers
from deepinfer.stages.memory.sizes import blocks_for
from deepinfer.stages.model.checkpoint import Checkpoint
from deepinfer.stages.model.config import EMBEDDING, ModelConfig
from deepinfer.stages.model.precision import choose_dtype, has_packed, keeps_bf16_copies
from deepinfer.stages.model.scratch import (
    Passes,
    activation_bytes,
    chunk_workspace,
    graph_bytes,
    pass_bytes,
    scratch_bytes,
    step_workspace,
)

MARGIN_BYTES, MARGIN_SHARE = 256 << 20, 0.06
"""Of a GPU, whichever is more: for the driver, for compiled kernels, and for what the allocator cannot use."""
HOST_SHARE = 0.25
"""Of the host's free memory, for a pool that nobody gave a size: other programs live there too."""
CONTEXTS_BY_DEFAULT = 4
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Demand(NamedTuple):
    """What a model needs whatever the size of the pool."""

    model: ModelConfig
    dtype: str
    weights: int
    """Bytes."""
    layout: BlockLayout
    kv_format: KVFormat
    groups: LayerGroups


class MemoryPlan(NamedTuple):
    """Bytes, but for blocks and tokens."""

    target: Target
    weights: int
    activations: int
    scratch: int
    graphs: int
    margin: int
    arena: int
    chunk: int
    """Of activations and scratch: what a prefill chunk holds while it runs."""
    step: int
    """The same of a decode step that is not captured."""
    num_blocks: int
    block_bytes: int
    block_size: int
    context: int
    longest_stored: int
    """Tokens of the longest request that this pool would hold alone."""
    reason: str

    @property
    def pool(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def token_capacity(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def needed(self) -> int:
        """Of the engine's memory. On a GPU the arena lies elsewhere."""
        arena = 0 if self.target.gpu else self.arena
        return self.weights + self.activations + self.scratch + self.graphs + self.margin + arena + self.pool

    def sizes(self) -> dict[str, int]:
        """The parts, in bytes, and what was free when it was made."""
        names = ("weights", "activations", "scratch", "graphs", "pool", "margin", "arena", "needed")
        return {**{name: getattr(self, name) for name in names}, "free": self.target.free}


def demand_of(checkpoint: Checkpoint, config: EngineConfig, target: Target) -> Demand:
    """Raises ConfigError for settings that do not go with this model."""
    model = checkpoint.config
    if config.max_context is not None and config.max_context > model.max_context:
        raise ConfigError(f"max_context is {config.max_context}; the model was made for at most {model.max_context}")
    dtype = choose_dtype(config.dtype, checkpoint.source.headers)
    check_w4_activations(config.w4_activations, config.model, dtype, checkpoint)
    copies = keeps_bf16_copies(config.w4_prefill) and not config.batch_invariant and not target.cuda_kernels
    weights = checkpoint.estimate_weight_bytes(dtype, copies, target.cuda_kernels)
    if model.tie_word_embeddings and _keeps_table_twice(checkpoint, config, target):
        weights += model.vocab_size * model.hidden_size * (2 if _dense_table(checkpoint) else 1)
    kv_format = format_of(config.kv_cache_dtype, dtype)
    groups = group_layers(model.windows)
    sizes = model.num_layers, model.num_kv_heads, model.head_dim, config.block_size
    return Demand(model, dtype, weights, kv_format.layout(*sizes, groups.groups), kv_format, groups)


def check_w4_activations(wish: str, model: str, dtype: str, checkpoint: Checkpoint) -> None:
    """Raises ConfigError if activations are to be rounded for 4-bit weights and there are none in this dtype."""
    if wish != "auto" and not (dtype == "bf16" and has_packed(checkpoint.source.headers)):
        raise ConfigError(
            f"w4_activations is {wish!r}, which is for 4-bit weights in bf16 compute; {model!r} in {dtype} has none: "
            "it must be auto",
            "w4_activations",
        )


def _keeps_table_twice(checkpoint: Checkpoint, config: EngineConfig, target: Target) -> bool:
    """Whether the head's kernel wants a tied table in an order of its own, from which embeddings are not read."""
    return target.cuda_kernels and (config.batch_invariant or not _dense_table(checkpoint))


def _dense_table(checkpoint: Checkpoint) -> bool:
    return checkpoint.source.headers[EMBEDDING].dtype != "Q8_0"


def format_of(name: str, dtype: str) -> KVFormat:
    try:
        return resolve_kv_format(name, compute_dtype=dtype)
    except ValueError as error:
        raise ConfigError(f"kv_cache_dtype: {error}") from error


def plan_memory(config: EngineConfig, demand: Demand, target: Target) -> MemoryPlan:
    """Raises ConfigError, with the arithmetic and the largest context that would fit, for what cannot."""
    plan = _with_pool(config, demand, target)
    if plan.needed > available(config, target) or plan.num_blocks < 1:
        raise ConfigError(_refusal(config, demand, plan))
    if target.gpu and plan.arena > target.host_free:
        raise ConfigError(
            f"max_cpu_offload_mb: {mib(plan.arena)} for swapped requests do not fit, {mib(target.host_free)} of host "
            "memory are free"
        )
    return plan


def available(config: EngineConfig, target: Target) -> int:
    """Bytes that the engine may take, its margin included."""
    if not target.gpu or config.gpu_memory_fraction is None:
        return target.free
    return min(target.free, int(config.gpu_memory_fraction * target.total) + _margin(target))


def _margin(target: Target) -> int:
    return max(MARGIN_BYTES, int(MARGIN_SHARE * target.total)) if target.gpu else 0


def rows_at_once(config: EngineConfig, target: Target) -> int:
    """At most: a prefill chunk, or one row of every running request; on CUDA both, side by side. Each running request
    samples in one of the two."""
    chunk, step = config.prefill_chunk_tokens * idle_chunks(target.cuda_kernels), config.max_running
    return chunk + step if target.cuda_kernels else max(chunk, step)


def without_pool(config: EngineConfig, demand: Demand, target: Target, context: int) -> MemoryPlan:
    """Everything but the pool."""
    item = ITEM_BYTES[demand.dtype]
    rows = rows_at_once(config, target)
    captured = target.cuda_kernels and config.cuda_graphs
    passes = Passes(config.prefill_chunk_tokens, config.max_running, context, config.batch_invariant, captured)
    swaps = config.cpu_offload and config.preemption != "recompute"
    return MemoryPlan(
        target=target,
        weights=demand.weights,
        activations=activation_bytes(demand.model, item, rows, config.max_running),
        scratch=scratch_bytes(demand.model, rows, context, passes if target.cuda_kernels else None),
        graphs=graph_bytes(demand.model, item, config.max_running, context) if captured else 0,
        margin=_margin(target),
        arena=config.max_cpu_offload_mb << 20 if swaps else 0,
        chunk=pass_bytes(demand.model, item, passes.chunk, passes.step) + chunk_workspace(demand.model, passes),
        step=pass_bytes(demand.model, item, passes.step, passes.step) + step_workspace(demand.model, passes),
        num_blocks=0,
        block_bytes=demand.layout.block_bytes,
        block_size=demand.layout.block_size,
        context=context,
        longest_stored=0,
        reason="",
    )


def _with_pool(config: EngineConfig, demand: Demand, target: Target) -> MemoryPlan:
    wished = config.max_context or demand.model.max_context
    size = demand.layout.block_size
    given = config.num_blocks or (None if config.max_cache is None else blocks_for(config.max_cache, size))
    if given is not None:
        longest = _longest_stored(config, demand, target, given)
        wished = min(wished, longest + 1)
        if config.max_context is None and longest > given * size:
            wished = min(wished, max(2, largest_context(config, demand, target, given)))
        plan = without_pool(config, demand, target, wished)
        reason = "num_blocks" if config.num_blocks else "max_cache"
        return plan._replace(num_blocks=given, longest_stored=longest, reason=reason)
    if config.max_context is None:
        wished = min(wished, max(2, largest_context(config, demand, target)))
    plan = without_pool(config, demand, target, wished)
    one = _blocks_alone(config, demand, target, wished - 1)
    room = pool_limit(config, demand, target, wished)
    if target.gpu:
        most, reason = one * config.max_running, "all that is left"
    else:
        share = int((target.free - plan.weights) * HOST_SHARE) // plan.block_bytes
        most, reason = min(one * CONTEXTS_BY_DEFAULT, share), f"{HOST_SHARE:.0%} of the free memory"
    if most >= one * CONTEXTS_BY_DEFAULT and room >= most:
        reason = f"{most // one} contexts of {wished} tokens"
    if config.max_context is not None:
        blocks = max(one, min(most, room))
    else:
        blocks = min(most, room)
    longest = _longest_stored(config, demand, target, blocks)
    context = min(wished, longest + 1)
    return plan._replace(num_blocks=blocks, context=context, longest_stored=longest, reason=reason)


def _chunk(config: EngineConfig, target: Target) -> int:
    return config.prefill_chunk_tokens * idle_chunks(target.cuda_kernels)


def _blocks_alone(config: EngineConfig, demand: Demand, target: Target, tokens: int) -> int:
    """Of all layers: a pool in which a request can store so many tokens."""
    rows = demand.groups.rows_alone(tokens, demand.layout.block_size, _chunk(config, target))
    return -(-rows // demand.groups.rows_per_block)


def _longest_stored(config: EngineConfig, demand: Demand, target: Target, blocks: int) -> int:
    rows, most = blocks * demand.groups.rows_per_block, demand.model.max_context
    return demand.groups.tokens_alone(rows, most, demand.layout.block_size, _chunk(config, target))


def largest_context(config: EngineConfig, demand: Demand, target: Target, given: int | None = None) -> int:
    """Tokens of the longest request for which there is memory, if the pool had all the rest, or else so many blocks,
    whatever these hold; 0 when nothing fits."""
    size, low, high = demand.layout.block_size, 0, blocks_for(demand.model.max_context, demand.layout.block_size)
    while low < high:
        middle = (low + high + 1) // 2
        tokens = middle * size
        blocks = _blocks_alone(config, demand, target, tokens) if given is None else given
        plan = without_pool(config, demand, target, tokens)._replace(num_blocks=blocks)
        low, high = (middle, high) if plan.needed <= available(config, target) else (low, middle - 1)
    return min(low * size, demand.model.max_context)


def pool_limit(config: EngineConfig, demand: Demand, target: Target, context: int) -> int:
    """Blocks for which there is memory beside passes over contexts of that length."""
    rest = without_pool(config, demand, target, max(2, context))
    return max(0, available(config, target) - rest.needed) // demand.layout.block_bytes


def _refusal(config: EngineConfig, demand: Demand, plan: MemoryPlan) -> str:
    target = plan.target
    parts = [
        f"weights {mib(plan.weights)}",
        f"activations {mib(plan.activations)}",
        f"scratch {mib(plan.scratch)}",
        f"a KV pool of {mib(max(plan.pool, plan.block_bytes))} ({max(1, plan.num_blocks):,} blocks of "
        f"{plan.block_bytes:,} bytes)",
    ]
    if plan.graphs:
        parts.append(f"captured steps {mib(plan.graphs)} (fewer with --max-running, none with --no-cuda-graphs)")
    if plan.margin:
        parts.append(f"a margin of {mib(plan.margin)}")
    if plan.arena and not target.gpu:
        parts.append(f"{mib(plan.arena)} for swapped requests (--max-cpu-offload-mb)")
    needed = plan.needed + (plan.block_bytes if plan.num_blocks < 1 else 0)
    fits = largest_context(config, demand, target)
    pool = pool_limit(config, demand, target, fits) * demand.layout.block_size
    hint = (
        f"the largest context that would fit is {fits} tokens (--max-context), the largest pool {pool} (--max-cache)"
        if fits
        else "not even the smallest context would fit"
    )
    return (
        f"it does not fit: {', '.join(parts)}: {mib(needed)} are needed, {mib(available(config, target))} are "
        f"available on {target.name}; {hint}"
    )


def mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
