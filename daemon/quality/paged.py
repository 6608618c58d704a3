"""A model over a pool of one KV format, run as the stages run it: requests, block tables, chunks, decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from deepinfer.kernels import KVFormat
from deepinfer.stages.memory.pool import KVPool
from deepinfer.stages.memory.sizes import blocks_for
from deepinfer.stages.messages import SamplingParams, Submit
from deepinfer.stages.model import Executor, Model, ModelError
from deepinfer.stages.request import Request
from deepinfer.stages.runner import Span, build_batch

BLOCK_SIZE = 16


class PagedModel:
    """Sequences of one call share the pool; the next call writes over their blocks. Raises ValueError where the device
    has no kernel for the format."""

    def __init__(self, model: Model, fmt: KVFormat, tokens: int, chunk: int) -> None:
        """`tokens`: of the pool, and the longest context."""
        config, ops = model.config, model.ops
        layout = fmt.layout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        self.format, self._chunk = fmt, chunk
        self.pool = KVPool(blocks_for(tokens, BLOCK_SIZE), layout, fmt, ops.device)
        tables = model.rope_tables(tokens)
        self.attention = ops.attention(
            "auto", model.attention_spec(), layout, fmt, self.pool.data, *tables, batch_invariant=False
        )
        self._executor = Executor(model, self.attention)
        self._order = np.random.default_rng(0).permutation(self.pool.num_blocks)

    @property
    def bytes_per_token(self) -> float:
        return self.pool.layout.block_bytes / BLOCK_SIZE

    def logits(self, ids: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        """Teacher-forced, chunk after chunk: float32 [rows, vocab] of the rows `first` to len(ids) - 2, those whose
        next token is known. The next chunk reads what the earlier ones have stored."""
        (request,) = self._requests([ids], 0)
        for start in range(0, len(ids), self._chunk):
            count = min(self._chunk, len(ids) - start)
            wanted = torch.tensor(range(max(first - start, 0), min(count, len(ids) - 1 - start)), dtype=torch.int64)
            logits = self._run([Span(request, start, count, False)], wanted)
            if len(wanted):
                yield logits

    def answers(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether greedy decoding continues `prompt` with `answer`."""
        got = torch.cat([rows.argmax(-1) for rows in self.logits([*prompt, *answer], len(prompt) - 1)])
        return got.tolist() == list(answer)

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Every prompt is prefilled alone; then all decode together, past end tokens too."""
        requests = self._requests(prompts, new_tokens)
        for request in requests:
            for start in range(0, request.length, self._chunk):
                count = min(self._chunk, request.length - start)
                logits = self._run([Span(request, start, count, False)], torch.tensor([count - 1]))
            request.append(int(logits[0].argmax()))
        for _ in range(new_tokens - 1):
            spans = [Span(request, request.length - 1, 1, False) for request in requests]
            for request, token in zip(requests, self._run(spans).argmax(-1).tolist(), strict=True):
                request.append(token)
        return [request.generated for request in requests]

    def _run(self, spans: Sequence[Span], wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the rows `wanted` of the batch, or of all. What the engine would end a request for raises
        ModelError."""
        batch = build_batch(spans)
        rows = torch.arange(batch.attention.num_rows) if wanted is None else wanted
        logits = self._executor.forward(batch._replace(logits_rows=rows))
        if batch.attention.nonfinite_rows.any() or not bool(logits.isfinite().all()):
            raise ModelError(f"KV format {self.format.name}: keys, values or logits are not finite")
        return logits

    def _requests(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Request]:
        requests, taken = [], 0
        for rid, prompt in enumerate(prompts):
            blocks = blocks_for(len(prompt) + new_tokens, BLOCK_SIZE)
            ids = np.asarray(prompt, dtype="<i4").tobytes()
            request = Request(Submit(rid=rid, prompt=ids, params=SamplingParams(max_new_tokens=new_tokens)), blocks)
            request.num_blocks = blocks
            request.table[:] = self._order[taken : taken + blocks]
            taken += blocks
            requests.append(request)
        return requests
