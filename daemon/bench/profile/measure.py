"""The passes that `bench profile` measures: an engine without its stages runs them, as its decode and prefill would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer.daemon.bench.profile.account import Account, account_of
from deepinfer.daemon.bench.profile.config import BLOCK_SIZE, ProfileBench
from deepinfer.daemon.bench.profile.costs import tensors_cost
from deepinfer.daemon.bench.profile.labels import LabelledAttention, Mark, Notes, labelled_model, now
from deepinfer.daemon.bench.profile.replay import TimedSteps
from deepinfer.daemon.engine_host import EngineHost
from deepinfer.stages.lanes import Lane
from deepinfer.stages.memory.sizes import blocks_for
from deepinfer.stages.messages import SamplingParams, Submit
from deepinfer.stages.model import Executor
from deepinfer.stages.model.sampler import Sampled, Sampler, SampleRow
from deepinfer.stages.request import Request
from deepinfer.stages.runner import ModelRunner, Span

SAMPLING = "argmax and sampling"


class Passes:
    """To be made and used in the engine's compute thread, to which its number of threads belongs."""

    def __init__(self, bench: ProfileBench, host: EngineHost) -> None:
        self._notes = Notes(host.ops.synchronize)
        vocab_size = host.model.config.vocab_size
        sampler = Sampler(vocab_size, vocab_size, (), host.ops.argmax)
        lane = Lane(host.ops.new_stream("profile"), None)
        self._plain = _Pair(
            ModelRunner(host.executor, sampler, lane), ModelRunner(host.prefill_executor, sampler, lane)
        )
        made = host.ops.step_programs(host.attention, blocks_for(host.max_context, BLOCK_SIZE))
        self._programs = None if made is None else TimedSteps(made.check, made.segments, made.groups, made.table_width)
        model = labelled_model(host.model, self._notes)
        attention: Any = LabelledAttention(host.attention, host.model, host.pool.layout, self._notes)
        noted: Any = _NotedSampler(sampler, self._notes)
        self._timed = _Pair(
            ModelRunner(Executor(model, attention, programs=self._programs), noted, lane),
            ModelRunner(Executor(model, attention, kept_rows=0), noted, lane),
        )
        self._synchronize = host.ops.synchronize
        groups = host.pool.layout.num_groups
        self._steps = {rows: _decode_spans(rows, bench.position, groups) for rows in bench.rows}
        self._prompts = {rows: [Span(_request(rows, 0, groups), 0, rows, True)] for rows in bench.chunks}
        self._marks: dict[int, list[Mark]] = {}
        for rows in bench.rows:
            self.step(rows)
            self._account(self._timed.decode, self._steps[rows])
            self._marks[rows] = self._notes.take_marks()
        for rows in bench.chunks:
            self.chunk(rows)

    @property
    def recorded(self) -> bool:
        """Whether decode steps are replayed; else they run call by call."""
        return self._programs is not None and self._programs.in_use

    def step(self, rows: int) -> int:
        """Nanoseconds of a decode step, as the engine does it."""
        return self._seconds(self._plain.decode, self._steps[rows])

    def timed_step(self, rows: int) -> Account:
        return self._account(self._timed.decode, self._steps[rows], self._marks[rows])

    def chunk(self, rows: int) -> int:
        """Nanoseconds of a prefill chunk, as the engine does it."""
        return self._seconds(self._plain.prefill, self._prompts[rows])

    def timed_chunk(self, rows: int) -> Account:
        return self._account(self._timed.prefill, self._prompts[rows])

    def _seconds(self, runner: ModelRunner, spans: Sequence[Span]) -> int:
        begin = now()
        runner.run(spans)
        self._synchronize()
        return now() - begin

    def _account(self, runner: ModelRunner, spans: Sequence[Span], marks: Sequence[Mark] = ()) -> Account:
        self._notes.take_calls()
        if self._programs is not None:
            self._programs.last = None
        whole = self._seconds(runner, spans)
        replay = None if self._programs is None else self._programs.last
        return account_of(whole, self._notes.take_calls(), replay, marks)


class _Pair:
    def __init__(self, decode: ModelRunner, prefill: ModelRunner) -> None:
        self.decode, self.prefill = decode, prefill


class _NotedSampler:
    def __init__(self, sampler: Sampler, notes: Notes) -> None:
        self._sampler, self._notes = sampler, notes

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        return self._notes.note(SAMPLING, tensors_cost, self._sampler.sample, (logits, rows), {})


def _request(tokens: int, first_block: int, groups: int) -> Request:
    """Of `tokens` known ones, in blocks of its own."""
    submit = Submit(rid=first_block, prompt=bytes(4 * tokens), params=SamplingParams(max_new_tokens=1))
    request = Request(submit, blocks_for(tokens + 1, BLOCK_SIZE), groups=groups)
    request.occupy(first_block)
    return request


def _decode_spans(rows: int, position: int, groups: int) -> list[Span]:
    """A row each, at `position`: the pool is zero behind it, which takes as long as any other content."""
    blocks = blocks_for(position + 2, BLOCK_SIZE)
    return [Span(_request(position + 1, row * blocks, groups), position, 1, True) for row in range(rows)]
