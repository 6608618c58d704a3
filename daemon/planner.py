"""How large the KV pool becomes. The plan is authoritative: what it grants is what is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

from deepinfer.daemon.config import ConfigError, EngineConfig
from deepinfer.kernels import BlockLayout

CGROUP = Path("/sys/fs/cgroup")
POOL_SHARE_OF_MEMORY = 0.25
CONTEXTS_BY_DEFAULT = 4


class PoolPlan(NamedTuple):
    num_blocks: int
    block_bytes: int
    block_size: int
    reason: str

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def token_capacity(self) -> int:
        return self.num_blocks * self.block_size


def plan_pool(config: EngineConfig, layout: BlockLayout, context: int, weight_bytes: int) -> PoolPlan:
    """`weight_bytes` are still to be allocated. Raises ConfigError, with the arithmetic, when it cannot fit."""
    blocks, reason = _wanted_blocks(config, layout, context, weight_bytes)
    plan = PoolPlan(blocks, layout.block_bytes, layout.block_size, reason)
    arena_bytes = config.max_cpu_offload_mb << 20 if config.cpu_offload else 0
    available = available_bytes()
    needed = weight_bytes + plan.pool_bytes + arena_bytes
    if needed > available:
        fits = max(0, available - weight_bytes - arena_bytes) // layout.block_bytes * layout.block_size
        raise ConfigError(
            f"weights of {_mib(weight_bytes)}, a pool of {_mib(plan.pool_bytes)} ({blocks} blocks of "
            f"{layout.block_bytes} bytes) and {_mib(arena_bytes)} for swapped requests need {_mib(needed)}, but "
            f"{_mib(available)} of memory are free; a pool of {fits} tokens would fit (--max-cache {fits}), and "
            "--max-cpu-offload-mb takes a smaller number"
        )
    return plan


def available_bytes() -> int:
    """Memory that this process may still take: what the machine has free, or less if its control group is smaller."""
    free = psutil.virtual_memory().available
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def _wanted_blocks(config: EngineConfig, layout: BlockLayout, context: int, weight_bytes: int) -> tuple[int, str]:
    if config.num_blocks is not None:
        return config.num_blocks, "num_blocks"
    if config.max_cache is not None:
        return -(-config.max_cache // layout.block_size), "max_cache"
    wanted = CONTEXTS_BY_DEFAULT * -(-context // layout.block_size)
    spare = available_bytes() - weight_bytes
    affordable = int(spare * POOL_SHARE_OF_MEMORY) // layout.block_bytes
    if affordable < 1:
        raise ConfigError(f"after weights of {_mib(weight_bytes)} no memory is left for a KV pool")
    if affordable < wanted:
        return affordable, f"{POOL_SHARE_OF_MEMORY:.0%} of the free memory"
    return wanted, f"{CONTEXTS_BY_DEFAULT} contexts of {context} tokens"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
