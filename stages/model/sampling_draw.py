"""Choosing one token of one row: top-k, top-p, min-p, and the inverse of the cumulative distribution.

The result is that of a full sort, but the sort is avoided: a bound that surely lies low enough picks the few
candidates out of the whole vocabulary first. All sums are fp64 and run in numpy on one thread, so
neither the batch nor the number of threads can change a bit.

Where values tie, the lowest token id comes first: top-k keeps the first k in the order (-logit, id), never
more, and top-p the shortest start of the order (-weight, id) whose mass reaches `top_p` of what top-k left.
"""

from __future__ import annotations

import numpy as np

from deepinfer.stages.messages import SamplingParams

BLOCK = 128
"""Entries whose maximum or sum is taken at once on the first level of a two-level search."""

NUCLEUS_FLOORS = (2.0**-8, 2.0**-12)
"""Probabilities: no more than 256, then 4,096 tokens can reach them, so that many are sorted at most."""


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) of token `index` of a request with this seed; 53 random bits.

    The first output of numpy's Philox4x64-10 (Salmon et al. 2011) whose key is the low 64 bits of `seed` and
    whose counter starts at `index`; numpy counts before it draws, so the block is that of `index + 1`.
    """
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=index).random_raw()
    return (bits >> 11) * 2.0**-53


def draw(logits: np.ndarray, peak: float, params: SamplingParams, u: float) -> int:
    """The token that `u` in [0, 1) selects. `logits`: fp32 [n] without NaN or +inf, `peak` their maximum.

    Temperature (> 0), top-k, top-p and min-p are applied in this order, as in transformers; each sees what
    the one before left. The cumulative distribution of the survivors runs in the order of token ids.
    """
    ids = None
    if 0 < params.top_k < len(logits):
        ids = largest(logits, params.top_k)
        logits = logits[ids]
    weights = np.subtract(logits, peak, dtype=np.float64)
    with np.errstate(over="ignore"):  # A tiny temperature leaves the peak alone: minus infinity for all others.
        weights /= params.temperature
    np.exp(weights, out=weights)
    if params.top_p < 1.0:
        kept = nucleus(weights, params.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    position = invert_cdf(weights, u)
    return position if ids is None else int(ids[position])


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Ascending positions of the k largest of `values` ([n], no NaN), of equal ones the lowest positions.

    k blocks have a maximum at or above the k-th largest block maximum, hence k values do: all others are out.
    """
    if k >= len(values):
        return np.arange(len(values))
    maxima = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    if k > len(maxima):
        return _cut(np.arange(len(values)), values, _kth_largest(values, k), k)
    candidates = np.flatnonzero(values >= _kth_largest(maxima, k))
    values = values[candidates]
    return _cut(candidates, values, _kth_largest(values, k), k)


def nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Ascending positions of the nucleus (Holtzman et al. 2020) of `weights` (fp64 [n], any sum above 0).

    A token stays when the mass of all before it in the order (-weight, id) is below `top_p`; one always does.
    """
    total = weights.sum()
    mass = top_p * total
    for floor in NUCLEUS_FLOORS:
        candidates = np.flatnonzero(weights >= floor * total)
        values = weights[candidates]
        count = _count_until(values, mass)
        if count <= len(values):
            return _cut(candidates, values, _kth_largest(values, count), count)
    return largest(weights, _count_wide(weights, mass))


def invert_cdf(weights: np.ndarray, u: float) -> int:
    """The first position whose inclusive cumulative weight exceeds u * total; never one of weight zero.

    Sums of blocks find the block, a running sum finds the entry in it. Rounding may leave the running sum
    just short of its block's sum; then the last entry that added to it is meant.
    """
    cumulative = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)).cumsum()
    target = u * cumulative[-1]
    block = int(np.searchsorted(cumulative, target, side="right"))
    if block:
        target -= cumulative[block - 1]
    inner = weights[block * BLOCK : (block + 1) * BLOCK].cumsum()
    found = np.searchsorted(inner, target, side="right")
    return block * BLOCK + int(min(found, np.searchsorted(inner, inner[-1])))


def _count_until(weights: np.ndarray, mass: float) -> int:
    """How many of the largest `weights` it takes to reach `mass`; one more than there are if they do not."""
    return int(np.searchsorted(np.sort(weights)[::-1].cumsum(), mass)) + 1


def _count_wide(weights: np.ndarray, mass: float) -> int:
    """As `_count_until`, but sorts one bucket only: the nucleus of a flat distribution is wide.

    The leading bits of an fp64 >= 0 order like the number, so they name its bucket: 128 buckets an octave.
    """
    buckets = weights.view(np.int64) >> 45
    highest = int(buckets.max())
    masses = np.bincount(highest - buckets, weights=weights).cumsum()
    crossed = int(np.searchsorted(masses, mass))
    if crossed:
        mass -= masses[crossed - 1]
    above = int(np.count_nonzero(buckets > highest - crossed))
    return above + _count_until(weights[buckets == highest - crossed], mass)


def _kth_largest(values: np.ndarray, k: int) -> np.floating:
    return np.partition(values, len(values) - k)[len(values) - k]


def _cut(positions: np.ndarray, values: np.ndarray, kth: np.floating, k: int) -> np.ndarray:
    """k of `positions` (ascending, with their `values`): all above `kth`, the first of those equal to it."""
    keep = values > kth
    tied = np.flatnonzero(values == kth)
    keep[tied[: k - np.count_nonzero(keep)]] = True
    return positions[keep]
