"""Builds an engine (model, pool, policy, the three stages) and runs it: in its own process, or inside a test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import zmq
from torch import Tensor

from deepinfer.daemon.config import ConfigError, EngineConfig
from deepinfer.daemon.planner import demand_of, plan_memory
from deepinfer.daemon.start_times import StartTimes
from deepinfer.daemon.target import target_of
from deepinfer.daemon.topology import Topology
from deepinfer.kernels import BlockLayout
from deepinfer.kernels.attention import AttentionSpec
from deepinfer.kernels.cpu_runtime import configure_threads, describe
from deepinfer.kernels.devices import DeviceError, open_device
from deepinfer.stages.compute import ComputeThread
from deepinfer.stages.decode import DecodeStage
from deepinfer.stages.flight_record import FlightRecord
from deepinfer.stages.lanes import Lanes
from deepinfer.stages.memory.arena import HostArena
from deepinfer.stages.memory.entries import ResidencyConfig, idle_chunks
from deepinfer.stages.memory.ledger import BlockLedger
from deepinfer.stages.memory.pool import KVPool
from deepinfer.stages.memory.prefix import PrefixTree
from deepinfer.stages.memory.residency import Residency
from deepinfer.stages.memory.sizes import blocks_for
from deepinfer.stages.messages import SamplingParams, Submit
from deepinfer.stages.model import Executor, ModelConfig, load_model, open_checkpoint, resolve_model
from deepinfer.stages.model.key_bias import KeyBiasRule
from deepinfer.stages.model.sampler import Sampler
from deepinfer.stages.model.step_graphs import StepGraphs
from deepinfer.stages.offload import CopyRows, OffloadStage, copy_rows
from deepinfer.stages.pace import SHARE, Pace
from deepinfer.stages.preemption import Preemption
from deepinfer.stages.prefill import PrefillStage
from deepinfer.stages.request import Request
from deepinfer.stages.runner import ModelRunner, Span
from deepinfer.stages.stage import Stage, monotonic

Progress = Callable[[str, int, int], None]

POLL_SECONDS = 0.1


class Vocabulary(NamedTuple):
    """What the engine must know of the tokenizer, which lives in the front process."""

    num_valid_tokens: int
    eos_token_ids: Iterable[int]


class EngineHost:
    """Loads the model in the constructor; `start` runs decode, prefill and offload in a thread each.

    Everything that can be refused is refused before weights are read: ConfigError, or the errors of
    `deepinfer.stages.model`.
    """

    def __init__(self, config: EngineConfig, progress: Progress, times: StartTimes | None = None) -> None:
        config.check()
        self.config, self.times, self.compute = config, times or StartTimes(), ComputeThread()
        try:
            self.compute.run(self._load, progress)
        except BaseException:
            self.compute.close()
            raise
        try:
            self._reserve()
        except BaseException:
            self.lanes.close()
            raise

    def _load(self, progress: Progress) -> None:
        config = self.config
        self.threads = config.threads or len(os.sched_getaffinity(0))
        try:
            configure_threads(self.threads)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            self.ops = open_device(config.device, config.w4_activations)
        except DeviceError as error:
            raise ConfigError(str(error)) from error
        checkpoint = open_checkpoint(resolve_model(config.model))
        target = target_of(self.ops)
        demand = demand_of(checkpoint, config, target)
        self.kv_format, self.layer_groups, layout = demand.kv_format, demand.groups, demand.layout
        self._refuse_what_cannot_run(demand.model, demand.dtype, layout)
        self.plan = plan_memory(config, demand, target)
        self.max_context = self.plan.context
        key_bias = KeyBiasRule(config.kv_key_bias, self.kv_format.k)
        with self.times.part("weights"):
            self.model = load_model(
                checkpoint, demand.dtype, config.batch_invariant, config.w4_prefill, progress, key_bias, self.ops
            )
        with self.times.part("pool"):
            self.pool = KVPool(self.plan.num_blocks, layout, self.kv_format, self.ops.device)
            self.arena = HostArena(self.plan.arena, layout.row_bytes, pin=self.ops.device.startswith("cuda"))
        tables = self.model.rope_tables(self.max_context)
        self.attention = self._attention(self.model.attention_spec(), layout, self.pool.data, *tables)
        max_blocks = blocks_for(self.max_context, config.block_size)
        programs = self.ops.step_programs(self.attention, max_blocks)
        self.executor = Executor(self.model, self.attention, self._graphs(), programs=programs)
        self.prefill_executor = Executor(self.model, self.attention, kept_rows=0)
        self.ops.synchronize()
        self.lanes = Lanes(self.ops, self.compute)
        self.requests: dict[int, Request] = {}
        self.stages: list[Stage] = []

    def _reserve(self) -> None:
        """Torch's allocator keeps what it was given once, for the stream that asked for it: no other program takes what
        the passes were promised."""
        for lane, size in ((self.lanes.prefill, self.plan.chunk), (self.lanes.decode, self.plan.step)):
            lane.run(_take_and_leave, size, self.ops.device)

    def _refuse_what_cannot_run(self, model: ModelConfig, dtype: str, layout: BlockLayout) -> None:
        """Makes the attention of a pool of one block, which knows what it has no kernel for."""
        try:
            self.ops.check_compute(dtype, self.config.batch_invariant)
        except ValueError as error:
            raise ConfigError(
                f"dtype is {self.config.dtype} ({dtype}), which {self.ops.name} cannot run: {error}"
            ) from error
        pool = torch.zeros(1, layout.row_bytes, dtype=torch.uint8, device=self.ops.device)
        table = torch.ones(1, model.head_dim // 2)
        scale = model.head_dim**-0.5
        heads = model.num_q_heads, model.num_kv_heads, model.head_dim
        self._attention(AttentionSpec(model.num_layers, *heads, scale, model.windows), layout, pool, table, table)

    def _attention(self, spec: AttentionSpec, layout: BlockLayout, pool: Tensor, cos: Tensor, sin: Tensor) -> Any:
        config = self.config
        try:
            return self.ops.attention(
                config.attention, spec, layout, self.kv_format, pool, cos, sin, config.batch_invariant
            )
        except ValueError as error:
            raise ConfigError(
                f"{self.ops.name} does not run kv_cache_dtype {config.kv_cache_dtype} ({self.kv_format.name}) with "
                f"head_dim {spec.head_dim}, block_size {config.block_size}, attention {config.attention}: {error}"
            ) from error

    def _graphs(self) -> StepGraphs | None:
        if not self.config.cuda_graphs:
            return None
        limits = self.config.max_running, self.max_context
        capture = self.ops.step_capture(self.attention, *limits)
        return None if capture is None else StepGraphs(capture, *limits)

    def start(
        self,
        context: zmq.Context,
        topology: Topology,
        vocabulary: Vocabulary,
        copy: CopyRows = copy_rows,
        record: FlightRecord | None = None,
    ) -> None:
        """Run the stages. `copy` moves rows between pool and host; tests put slow or failing ones in its place.
        `record` outlives this process."""
        config, model_config = self.config, self.model.config
        valid = min(vocabulary.num_valid_tokens, model_config.vocab_size)
        eos = frozenset(model_config.eos_token_ids) | frozenset(vocabulary.eos_token_ids)
        sampler = Sampler(model_config.vocab_size, valid, eos, self.ops.argmax)
        record = record if record is not None else FlightRecord()
        runner = ModelRunner(self.executor, sampler, self.lanes.decode, record.decode)
        prefill_runner = ModelRunner(self.prefill_executor, sampler, self.lanes.prefill, record.prefill)
        can_swap = self.arena.num_rows > 0
        residency = Residency(
            BlockLedger(len(self.pool.data), PrefixTree() if config.prefix_cache else None, self.layer_groups.kinds),
            config.block_size,
            ResidencyConfig(
                max_running=config.max_running,
                prefill_chunk_tokens=config.prefill_chunk_tokens,
                idle_chunks=idle_chunks(self.ops.overlaps),
                victims=config.victims,
                offload_unit=config.offload_unit,
                quantum=config.residency_quantum,
                max_parks=config.max_parks,
                window=self.layer_groups.window,
                swap=can_swap,
                recompute=config.preemption != "swap-only",
            ),
        )
        self.residency = residency
        pace = Pace(1.0 if self.ops.overlaps else SHARE)
        self.decode = DecodeStage(
            context,
            topology.decode,
            topology.outboxes("admission", "prefill", "offload"),
            runner,
            self.pool,
            residency,
            Preemption(config.preemption, can_swap, self.pool.layout.row_bytes),
            pace,
            self.requests,
            eos,
            (config.model, self.kv_format.name),
            overlap=self.ops.overlaps,
        )
        self.prefill = PrefillStage(
            context, topology.prefill, topology.outboxes("decode", "admission"), prefill_runner, self.requests
        )
        self.offload = OffloadStage(
            context,
            topology.offload,
            topology.outboxes("decode", "admission"),
            self.pool.data,
            self.arena,
            pace,
            self._on_a_stream(copy),
            config.verify_payloads,
            measure=config.preemption == "auto" and can_swap,
        )
        self.stages = [self.prefill, self.offload, self.decode]
        for stage in self.stages:
            stage.start()

    def warm_up(self) -> None:
        """Run one prefill chunk and one decode step on borrowed blocks, so that kernels are compiled and buffers are
        there before the first request; where there are graphs, a step of every number of rows that they are captured
        for. To be called before `start`; leaves the pool zeroed."""
        block_size, blocks = self.config.block_size, self.plan.num_blocks
        chunk = self.config.prefill_chunk_tokens * idle_chunks(self.ops.overlaps)
        rows = max(1, min(chunk, blocks * block_size - 1, self.max_context - 2))
        submit = Submit(rid=0, prompt=bytes(4 * rows), params=SamplingParams(max_new_tokens=2))
        groups = self.pool.layout.num_groups
        request = Request(submit, blocks_for(rows + 1, block_size), groups=groups)
        request.occupy(0)
        vocab_size = self.model.config.vocab_size
        sampler = Sampler(vocab_size, vocab_size, (), self.ops.argmax)
        runner = ModelRunner(self.executor, sampler, self.lanes.decode)
        ModelRunner(self.prefill_executor, sampler, self.lanes.prefill).run([Span(request, 0, rows, True)])
        request.append(0)
        runner.run([Span(request, rows, 1, True)])
        for count in () if self.executor.graphs is None else self.executor.graphs.row_buckets:
            runner.run([Span(request, 0, 1, True)] * count)
        self.lanes.decode.run(self.pool.data[: groups * request.num_blocks].zero_)

    def _on_a_stream(self, copy: CopyRows) -> CopyRows:
        return lambda destination, source: self.lanes.offload.run(copy, destination, source)

    def close(self) -> None:
        """End the threads that compute. The stages have ended."""
        self.lanes.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Until every stage has ended, or one has died: then True. False after `seconds`."""
        give_up = None if seconds is None else monotonic() + seconds
        while not all(stage.join(POLL_SECONDS) for stage in self.stages):
            if self.failure() is not None:
                return True
            if give_up is not None and monotonic() > give_up:
                return False
        return True

    def pulses(self) -> dict[str, tuple[bool, int]]:
        """Of every thread: whether it has work, and its progress. From any thread."""
        working, calls = self.lanes.pulse()
        compute = (working, calls + self.executor.progress + self.prefill_executor.progress)
        return {"compute": compute, **{stage.name: stage.pulse() for stage in self.stages}}

    def failure(self) -> BaseException | None:
        return next((stage.failure for stage in self.stages if stage.failure is not None), None)

    def summary(self) -> dict[str, Any]:
        """What `start` prints and `status` shows: effective values, not wished ones."""
        return {
            "model": self.config.model,
            "load": self.times.describe(self.model.file_bytes),
            **self.model.describe(),
            "rope": self.model.config.rope.named(self.max_context),
            "device": self.ops.name,
            "threads": self.threads,
            "kv_cache_dtype": self.kv_format.name,
            "attention": self.attention.name,
            "cuda_graphs": self.executor.graphs is not None,
            "step_programs": self.executor.programs is not None and self.executor.programs.in_use,
            "prefill_beside_decode": self.ops.overlaps,
            "batch_invariant": self.config.batch_invariant,
            "prefix_cache": self.config.prefix_cache,
            "block_size": self.config.block_size,
            "num_blocks": self.plan.num_blocks,
            "block_bytes": self.plan.block_bytes,
            "layer_groups": self.layer_groups.describe(),
            "pool_reason": self.plan.reason,
            "token_capacity": self.plan.token_capacity,
            "context": self.max_context,
            "longest_stored": self.plan.longest_stored,
            "pool_bytes": self.pool.bytes,
            "memory_plan": self.plan.sizes(),
            "cpu_offload_enabled": self.arena.num_rows > 0,
            "cpu_offload_budget_bytes": self.arena.num_rows * self.arena.row_bytes,
            "arena_pinned": self.arena.pinned,
            "runtime": describe(),
        }


def _take_and_leave(size: int, device: str) -> None:
    torch.empty(size, dtype=torch.uint8, device=device)
