"""The sampler: from the logits of a batch to one token a request.

It is counter-based. Token `index` of a request is a function of (seed, index, its row of logits, its own
history) alone. No generator keeps a state, so neither the batch, nor the row's place in it, nor a swap or a
recovery can change a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from deepinfer.stages.messages import SamplingParams
from deepinfer.stages.model.sampling_draw import draw, largest, uniform
from deepinfer.stages.model.sampling_logits import edit_logits, needs_edit

NO_TOKEN = -1


@dataclass(slots=True)
class SampleRow:
    """The request behind one row of logits.

    `index` is the place of the token to be chosen among the generated ones, 0 for the first.
    `prompt`: int32 [n].
    """

    params: SamplingParams
    index: int
    prompt: np.ndarray
    generated: list[int]


class Sampled(NamedTuple):
    """`error` says why no token was chosen (`token_id` is then -1); `top` runs from the likeliest down."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str = ""


Argmax = Callable[[torch.Tensor, int], torch.Tensor]
"""See `kernels.ops.Ops.argmax`."""


class Sampler:
    """Chooses among the ids below `num_valid_tokens`; the padding of the vocabulary is never looked at.

    With `argmax`, rows that take the highest logit as it is are decided where the logits lie, and only their ids are
    brought to the host. The result is the same.
    """

    def __init__(
        self, vocab_size: int, num_valid_tokens: int, eos_token_ids: Iterable[int], argmax: Argmax | None = None
    ) -> None:
        if not 0 < num_valid_tokens <= vocab_size:
            raise ValueError(f"num_valid_tokens is {num_valid_tokens}, must be from 1 to vocab_size = {vocab_size}")
        self.vocab_size = vocab_size
        self.num_valid_tokens = num_valid_tokens
        self.eos_token_ids = tuple(eos_token_ids)
        self._argmax = argmax

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """One `Sampled` for each row of `logits` (fp32 [R, vocab_size], left unchanged).

        Temperature 0 takes the highest logit after bias, penalties and bans, the lowest id of several.
        A row with a NaN or +inf, or with nothing but -inf, gets an error; the other rows do not notice.
        Log probabilities are those of the unedited logits at temperature 1 over the valid ids.

        Raises ValueError when the shape or dtype of `logits` is not as said.
        """
        if logits.dtype != torch.float32 or logits.shape != (len(rows), self.vocab_size):
            raise ValueError(
                f"logits are {logits.dtype} {tuple(logits.shape)}, must be torch.float32 {(len(rows), self.vocab_size)}"
            )
        results = {place: Sampled(token) for place, token in self._highest(logits, rows).items()}
        rest = [place for place in range(len(rows)) if place not in results]
        if rest:  # Greedy rows are done, and to index with nothing would cost more than they did.
            chosen = logits if len(rest) == len(rows) else logits[rest]
            valid = chosen.detach()[:, : self.num_valid_tokens].cpu().numpy()
            for place, values in zip(rest, valid, strict=True):
                results[place] = self._sample_row(values, rows[place])
        return [results[place] for place in range(len(rows))]

    def _highest(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> dict[int, int]:
        """Token ids by place in `rows`, of those that take the highest logit as it is. Not of rows that are not finite:
        somebody must look at them to say why."""
        plain = [place for place, row in enumerate(rows) if _takes_the_highest(row)]
        if self._argmax is None or not plain:
            return {}
        ids = self._argmax(logits, self.num_valid_tokens).tolist()
        return {place: ids[place] for place in plain if ids[place] != NO_TOKEN}

    def _sample_row(self, raw: np.ndarray, row: SampleRow) -> Sampled:
        peak = raw[raw.argmax()]
        if not np.isfinite(peak):
            return Sampled(NO_TOKEN, error=_describe_nonfinite(raw))
        try:
            token_id = self._choose(raw, row)
        except ValueError as error:
            return Sampled(NO_TOKEN, error=str(error))
        if row.params.logprobs is None:
            return Sampled(token_id)
        return _with_logprobs(raw, peak, token_id, row.params.logprobs)

    def _choose(self, logits: np.ndarray, row: SampleRow) -> int:
        """Raises ValueError when the request's own bias, penalties and bans leave nothing to choose."""
        params = row.params
        if needs_edit(params, row.index):
            logits = edit_logits(logits, params, row.index, row.prompt, row.generated, self.eos_token_ids)
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise ValueError(f"no token can be chosen: the highest logit after edits is {logits[best]}")
        if params.temperature == 0.0:
            return best
        return draw(logits, logits[best], params, uniform(params.seed, row.index))


def _takes_the_highest(row: SampleRow) -> bool:
    params = row.params
    return params.temperature == 0.0 and params.logprobs is None and not needs_edit(params, row.index)


def _with_logprobs(raw: np.ndarray, peak: np.floating, token_id: int, count: int) -> Sampled:
    """Ids of probability zero are not listed, so `top` may be shorter than `count`."""
    shifted = np.subtract(raw, peak, dtype=np.float64)
    log_total = np.log(np.exp(shifted).sum())
    ids = largest(raw, count) if count else np.empty(0, dtype=np.int64)
    ids = ids[np.argsort(-shifted[ids], kind="stable")]
    top = tuple((int(i), float(shifted[i] - log_total)) for i in ids if np.isfinite(shifted[i]))
    return Sampled(token_id, float(shifted[token_id] - log_total), top)


def _describe_nonfinite(raw: np.ndarray) -> str:
    """NaN is the maximum of every row that holds one, so the maximum alone tells good rows from bad ones."""
    nans, highs = np.count_nonzero(np.isnan(raw)), np.count_nonzero(np.isposinf(raw))
    if nans or highs:
        return f"non-finite logits: {nans} NaN and {highs} +inf among {len(raw)}"
    return f"non-finite logits: all {len(raw)} are -inf"
