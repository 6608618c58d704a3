"""What a request does to its logits before a token is drawn: bias, penalties and bans, for one row.

Everything here works in fp32 on the row of one request and reads that request's own history alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from deepinfer.stages.messages import SamplingParams


def needs_edit(params: SamplingParams, index: int) -> bool:
    """False when `edit_logits` would return the row as it is, so that the copy can be spared."""
    return bool(params.logit_bias or _has_penalty(params) or index < params.min_new_tokens)


def edit_logits(
    row: np.ndarray,
    params: SamplingParams,
    index: int,
    prompt: np.ndarray,
    generated: list[int],
    eos_token_ids: Iterable[int],
) -> np.ndarray:
    """A changed copy of `row` (fp32 [n], n valid ids); `row` itself stays as it was.

    In this order: logit bias, repetition penalty (prompt and generated tokens; CTRL, Keskar et al. 2019),
    frequency and presence penalty (generated tokens only, as in vLLM), then the bans of `min_new_tokens`:
    while `index < min_new_tokens` neither an end-of-sequence id nor a stop id is chosen, `ignore_eos` or not.

    Raises ValueError when `logit_bias` names an id outside [0, n).
    """
    edited = row.copy()
    if params.logit_bias:
        _add_bias(edited, params.logit_bias)
    if _has_penalty(params):
        past = _valid(np.asarray(generated, dtype=np.int64), len(edited))
        seen = np.concatenate((_valid(prompt, len(edited)), past))
        _penalise_repetition(edited, seen, np.float32(params.repetition_penalty))
        _penalise_use(edited, past, params.presence_penalty, params.frequency_penalty)
    if index < params.min_new_tokens:
        banned = np.array([*eos_token_ids, *params.stop_token_ids], dtype=np.int64)
        edited[_valid(banned, len(edited))] = -np.inf
    return edited


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _valid(ids: np.ndarray, n: int) -> np.ndarray:
    """Ids of the padded part of the vocabulary have no logit here."""
    return ids[(ids >= 0) & (ids < n)]


def _add_bias(logits: np.ndarray, bias: dict[int, float]) -> None:
    ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
    outside = ids[(ids < 0) | (ids >= len(logits))]
    if len(outside):
        raise ValueError(f"logit_bias names token {outside[0]}; token ids go from 0 to {len(logits) - 1}")
    logits[ids] += np.fromiter(bias.values(), dtype=np.float64, count=len(bias))


def _penalise_repetition(logits: np.ndarray, seen: np.ndarray, penalty: np.float32) -> None:
    """A positive logit is divided, any other multiplied; an id seen twice is written twice with one value. A penalty
    so small that a logit becomes infinite ends the request later, with `non_finite_logits`."""
    old = logits[seen]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # `where` computes both for all.
        logits[seen] = np.where(old > 0, old / penalty, old * penalty)


def _penalise_use(logits: np.ndarray, generated: np.ndarray, presence: float, frequency: float) -> None:
    used, counts = np.unique(generated, return_counts=True)
    logits[used] -= frequency * counts + presence
