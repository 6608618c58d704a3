"""Decode steps without stages and sockets: the engine's own runner over requests that nobody has sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepinfer.daemon.engine_host import EngineHost
from deepinfer.stages.lanes import Lane
from deepinfer.stages.messages import SamplingParams, Submit
from deepinfer.stages.model.sampler import Sampler
from deepinfer.stages.request import Request
from deepinfer.stages.runner import ModelRunner, Span, build_batch


class StepSeconds(NamedTuple):
    """Means over the steps of a pass."""

    run: float
    """A step as the decode stage has it done: rows to a batch, forward pass, sampling, tokens."""
    forward: float
    """Of it, the forward pass."""


class InProcess:
    """Owns an engine whose stages were never started: its pool, its executors, its lanes. Those who make it have
    warmed it up."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        vocab_size = host.model.config.vocab_size
        sampler = Sampler(vocab_size, vocab_size, (), host.ops.argmax)
        self._prefill = ModelRunner(host.prefill_executor, sampler, host.lanes.prefill)
        self._decode = ModelRunner(host.executor, sampler, host.lanes.decode)

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int, skip: int) -> StepSeconds:
        """Prefills every prompt and decodes all together, greedily. The first `skip` steps are not measured, so that
        contexts are as long as those of streams that waited for one another."""
        requests = self._requests(prompts, new_tokens)
        for request in requests:
            self._compute_prompt(request)
        runs: list[float] = []
        forwards: list[float] = []
        for number in range(new_tokens - 1):
            spans = [Span(request, request.length - 1, 1, True) for request in requests]
            batch = build_batch(spans)
            began = time.perf_counter()
            outcomes = self._decode.run(spans)
            ran = time.perf_counter()
            # Once more, with the same tokens: it stores the same keys and values in the same places.
            self._lane.run(self._host.executor.forward, batch)
            ended = time.perf_counter()
            if number >= skip:
                runs.append(ran - began)
                forwards.append(ended - ran)
            for request, outcome in zip(requests, outcomes, strict=True):
                if outcome.item is None:
                    raise RuntimeError(f"a decode step failed: {outcome.error}")
                request.append(outcome.item.token_id)
        return StepSeconds(float(np.mean(runs)), float(np.mean(forwards)))

    @property
    def _groups(self) -> int:
        return self._host.pool.layout.num_groups

    @property
    def _lane(self) -> Lane:
        return self._host.lanes.decode

    def _compute_prompt(self, request: Request) -> None:
        chunk = self._host.config.prefill_chunk_tokens
        length = request.length
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            outcomes = self._prefill.run([Span(request, start, count, start + count == length)])
        if outcomes[0].item is None:
            raise RuntimeError(f"a prefill chunk failed: {outcomes[0].error}")
        request.append(outcomes[0].item.token_id)

    def _requests(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Request]:
        blocks = self._host.plan.num_blocks // len(prompts)
        requests = []
        for rid, prompt in enumerate(prompts):
            ids = np.asarray(prompt, dtype="<i4").tobytes()
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
            request = Request(Submit(rid=rid, prompt=ids, params=params), blocks, groups=self._groups)
            request.occupy(rid * blocks)
            requests.append(request)
        return requests
