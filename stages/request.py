"""The engine's record of one request: its tokens, its block table, its times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer.stages.clock import RequestClock
from deepinfer.stages.memory.prefix import chain_keys
from deepinfer.stages.messages import SamplingParams, Submit


class Request:
    """Owned by decode. Prefill reads it while a PrefillChunk names it; nobody else sees it.

    `tokens`: int32 [prompt + max_new_tokens], the first `length` are known. `table`: int32 [groups, max_blocks], rows
    of the pool in context order for each group of layers, of which the first `num_blocks` are valid; decode refreshes
    it from the ledger before anyone is told to use it.
    """

    def __init__(
        self, submit: Submit, max_blocks: int, root_key: bytes = b"", block_size: int = 0, groups: int = 1
    ) -> None:
        prompt = np.frombuffer(submit.prompt, dtype="<i4")
        generated = np.frombuffer(submit.generated, dtype="<i4")
        self.rid = submit.rid
        self.params: SamplingParams = submit.params
        self.priority = submit.priority
        self.prompt = prompt
        self.generated: list[int] = generated.tolist()
        self.tokens = np.zeros(len(prompt) + submit.params.max_new_tokens, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.tokens[len(prompt) : len(prompt) + len(generated)] = generated
        self.length = len(prompt) + len(generated)
        self.table = np.zeros((groups, max_blocks), dtype=np.int32)
        self.num_blocks = 0
        self.clock = submit.clock or RequestClock()
        self._computed = self.length if submit.generated else 0
        self.cached_tokens = 0
        """Prompt tokens that were found in the prefix tree when it was first admitted."""
        self._root_key = root_key
        self._block_size = block_size

    @property
    def total(self) -> int:
        """Tokens whose keys and values are stored at most: the last token is sampled and never fed back."""
        return len(self.tokens) - 1

    def occupy(self, first: int) -> None:
        """Its table is full, with the rows of blocks from `first` on: of a pool that nobody hands out."""
        groups, self.num_blocks = self.table.shape
        rows = np.arange(groups * first, groups * (first + self.num_blocks), dtype=np.int32)
        self.table[:] = rows.reshape(-1, groups).T

    def keys(self, known: Sequence[bytes]) -> list[bytes]:
        """Prefix keys of the full blocks after those that `known` has; see `memory.prefix`."""
        first = len(known) * self._block_size
        parent = known[-1] if known else self._root_key
        return chain_keys(parent, self.tokens[first : self.length], self._block_size)

    def note_found(self, tokens: int) -> None:
        """It was admitted with `tokens` already stored by others."""
        if not self.clock.parks:
            self.cached_tokens = tokens
        self._computed = max(self._computed, tokens)

    def note_computed(self, until: int) -> int:
        """Prefill has reached token `until`. Returns how many of these were computed for the first time: what is
        computed again after a preemption or a recovery is nobody's throughput."""
        new = max(0, until - self._computed)
        self._computed = max(self._computed, until)
        return new

    def append(self, token_id: int) -> None:
        self.tokens[self.length] = token_id
        self.length += 1
        self._computed = max(self._computed, self.length)
        self.generated.append(token_id)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> str | None:
        """Why the newest token ends the request, or None."""
        token = self.generated[-1]
        if token in self.params.stop_token_ids or (token in eos_token_ids and not self.params.ignore_eos):
            return "stop"
        return "length" if self.length == len(self.tokens) else None
