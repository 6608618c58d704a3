"""What `kv-quality` measures of one KV format: divergence, top-1, perplexity, greedy texts, passkeys."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.daemon.quality.paged import PagedModel
from deepinfer.daemon.quality.text import Material

_ROWS = 32
"""Rows that are compared at a time, in float64."""


@dataclass(frozen=True)
class Exact:
    """What the model says with its keys and values in the compute dtype."""

    logits: list[torch.Tensor]
    """float32 [rows, vocab] on the CPU, chunk after chunk of all windows."""
    perplexity: float
    generated: list[list[int]]
    passkeys: list[bool]


def measure_exact(paged: PagedModel, material: Material, skip: int, new_tokens: int) -> Exact:
    logits = [rows.cpu() for window in material.windows for rows in paged.logits(window, skip)]
    perplexity = perplexity_of(logits, material.windows, skip)
    return Exact(logits, perplexity, paged.greedy(material.prompts, new_tokens), _passkeys(paged, material))


def measure_format(
    paged: PagedModel, material: Material, exact: Exact, skip: int, eos: frozenset[int]
) -> dict[str, Any]:
    """Plain values. Divergences in nats, agreement in percent, `first_divergence` as the index of the first other token
    of each prompt, None where there is none up to the end of the exact text."""
    got = (rows.cpu() for window in material.windows for rows in paged.logits(window, skip))
    compared = compare(got, exact.logits, material.windows, skip)
    generated = paged.greedy(material.prompts, len(exact.generated[0]))
    parted = [first_divergence(ours, theirs, eos) for ours, theirs in zip(generated, exact.generated, strict=True)]
    return {
        "bytes_per_token": paged.bytes_per_token,
        "attention": paged.attention.name,
        **compared,
        "perplexity_change": compared["perplexity"] - exact.perplexity,
        "first_divergence": parted,
        "same_texts": parted.count(None),
        "median_first_divergence": _median([at for at in parted if at is not None]),
        "passkeys": _passkeys(paged, material),
        "kv_saturated": paged.attention.kv_saturated_total,
    }


def compare(
    got: Iterable[torch.Tensor], exact: Sequence[torch.Tensor], windows: Sequence[Sequence[int]], skip: int
) -> dict[str, Any]:
    """Of logits, chunk after chunk of all windows: positions, KL divergence in nats, top-1 agreement in percent, and
    the perplexity of `got`."""
    divergences, agreements, losses = [], [], []
    for ours, theirs, targets in zip(got, exact, _targets(exact, windows, skip), strict=True):
        divergences.append(divergence(ours, theirs))
        agreements.append(ours.argmax(-1) == theirs.argmax(-1))
        losses.append(_losses(ours, targets))
    kld = torch.cat(divergences)
    return {
        "positions": len(kld),
        "kld": {"mean": float(kld.mean()), "p99": float(kld.quantile(0.99)), "max": float(kld.max())},
        "top1_percent": 100 * float(torch.cat(agreements).double().mean()),
        "perplexity": _perplexity(losses),
    }


def perplexity_of(logits: Sequence[torch.Tensor], windows: Sequence[Sequence[int]], skip: int) -> float:
    targets = _targets(logits, windows, skip)
    return _perplexity([_losses(rows, wanted) for rows, wanted in zip(logits, targets, strict=True)])


def divergence(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """KL(exact, got) of each row of logits [rows, vocab], float64 [rows], in nats."""
    pieces = []
    for q, p in zip(got.split(_ROWS), exact.split(_ROWS), strict=True):
        log_q, log_p = q.double().log_softmax(-1), p.double().log_softmax(-1)
        pieces.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(pieces)


def first_divergence(got: Sequence[int], exact: Sequence[int], eos: frozenset[int]) -> int | None:
    """Index of the first token of `exact`, up to its first end token, that `got` does not share."""
    for index, (ours, theirs) in enumerate(zip(got, exact, strict=True)):
        if ours != theirs:
            return index
        if theirs in eos:
            return None
    return None


def _targets(logits: Sequence[torch.Tensor], windows: Sequence[Sequence[int]], skip: int) -> Sequence[torch.Tensor]:
    """int64 [rows] for each chunk: the tokens that the text goes on with."""
    following = [token for window in windows for token in window[skip + 1 :]]
    return torch.tensor(following).split([len(rows) for rows in logits])


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def _perplexity(losses: Sequence[torch.Tensor]) -> float:
    return math.exp(float(torch.cat(list(losses)).double().mean()))


def _passkeys(paged: PagedModel, material: Material) -> list[bool]:
    return [paged.answers(passkey.prompt, passkey.answer) for passkey in material.passkeys]


def _median(values: Sequence[int]) -> float | None:
    return statistics.median(values) if values else None
