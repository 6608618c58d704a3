"""`deepinfer-daemon plan`: the memory plan of an engine that is not started, and what every KV format would hold."""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

from rich.table import Table

from deepinfer.daemon.config import ConfigError, EngineConfig
from deepinfer.daemon.display import sliding_layers, wide_console
from deepinfer.daemon.planner import (
    Demand,
    MemoryPlan,
    demand_of,
    largest_context,
    mib,
    plan_memory,
    pool_limit,
    rows_at_once,
)
from deepinfer.daemon.target import Target, described
from deepinfer.kernels.cuda.decode_plan import DecodePlan
from deepinfer.stages.model import open_checkpoint, resolve_model
from deepinfer.stages.model.checkpoint import Checkpoint

FORMATS = ("fp16", "int8", "fp8_e4m3", "fp8_e5m2")


class Capacity(NamedTuple):
    """Of one KV format, when the pool has all that the rest leaves."""

    kv_format: str
    block_bytes: int
    blocks: int
    tokens: int
    context: int
    """Longest request, prompt and answer."""
    decoding_tokens: int
    """Of such requests while they decode, as many as there is room for at once: sliding layers keep what they see."""


def capacity_of(name: str, checkpoint: Checkpoint, config: EngineConfig, target: Target) -> Capacity:
    wish = dataclasses.replace(config, kv_cache_dtype=name, num_blocks=None, max_cache=None, max_context=None)
    demand = demand_of(checkpoint, wish, target)
    context = largest_context(wish, demand, target)
    blocks = pool_limit(wish, demand, target, context)
    size, block_bytes = demand.layout.block_size, demand.layout.block_bytes
    rows = blocks * demand.groups.rows_per_block
    decoding = rows * context // max(1, demand.groups.decoding_rows(context - 1, size)) if blocks else 0
    return Capacity(demand.kv_format.name, block_bytes, blocks, blocks * size, context, decoding)


def show_plan(config: EngineConfig, memory: int | None, as_json: bool) -> None:
    """Prints it. Raises ConfigError when it does not fit, ModelError and DeviceError."""
    checkpoint = open_checkpoint(resolve_model(config.model))
    try:
        target = described(config.device, memory)
        demand = demand_of(checkpoint, config, target)
        if target.cuda_kernels:
            _check_kernels(demand)
        plan = plan_memory(config, demand, target)
        names = dict.fromkeys([demand.kv_format.name, *FORMATS])
        capacities = [capacity_of(name, checkpoint, config, target) for name in names]
    finally:
        checkpoint.source.close()
    if as_json:
        print(json.dumps(_as_json(config, plan, demand, capacities), indent=1))
    else:
        _print(config, plan, demand, capacities)


def _check_kernels(demand: Demand) -> None:
    """What a start would refuse. Raises ConfigError."""
    model, layout = demand.model, demand.layout
    group = model.num_q_heads // model.num_kv_heads
    try:
        DecodePlan(layout.k, layout.v, model.head_dim, group, layout.block_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _as_json(config: EngineConfig, plan: MemoryPlan, demand: Demand, capacities: list[Capacity]) -> dict:
    return {
        "model": config.model,
        "device": plan.target.name,
        "compute_dtype": demand.dtype,
        "kv_cache_dtype": demand.kv_format.name,
        **plan.sizes(),
        "num_blocks": plan.num_blocks,
        "block_bytes": plan.block_bytes,
        "layer_groups": demand.groups.describe(),
        "token_capacity": plan.token_capacity,
        "context": plan.context,
        "reason": plan.reason,
        "capacities": [capacity._asdict() for capacity in capacities],
    }


def _print(config: EngineConfig, plan: MemoryPlan, demand: Demand, capacities: list[Capacity]) -> None:
    target, console = plan.target, wide_console()
    place = "of host memory" if target.gpu else ""
    rows = [
        ("model", f"{config.model}, computed in {demand.dtype}"),
        ("device", f"{target.name}, {mib(target.free)} free"),
        ("weights", mib(plan.weights)),
        ("activations", f"{mib(plan.activations)} ({rows_at_once(config, target)} rows at once)"),
        ("scratch", f"{mib(plan.scratch)} (attention, RoPE tables)"),
        ("captured steps", mib(plan.graphs)),
        (
            "KV pool",
            f"{mib(plan.pool)} ({demand.kv_format.name}: {plan.num_blocks:,} blocks = {plan.token_capacity:,} tokens; "
            f"{plan.reason})",
        ),
        *sliding_layers(demand.groups.describe()),
        ("swapped requests", f"{mib(plan.arena)} {place}".rstrip()),
        ("margin", mib(plan.margin)),
        ("needed", mib(plan.needed)),
        ("context", f"{plan.context:,} tokens, prompt and answer"),
    ]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False, markup=False)
    console.print("\nIf the pool had all that the rest leaves:", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    headings = ["KV format", "block", "blocks", "tokens", "longest request"]
    if demand.groups.window:
        headings.append("tokens while decoding")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "KV format" else "right")
    for entry in capacities:
        table.add_row(entry.kv_format, *(f"{number:,}" for number in entry[1 : len(headings)]))
    console.print(table, highlight=False, markup=False)
