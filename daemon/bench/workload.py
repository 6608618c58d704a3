"""What a load consists of: prompts of random ids or of a file, how long they are, and when they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from deepinfer.clients import Client
from deepinfer.daemon.bench.dataset import Entry

FIRST_ID = 100
"""Of random prompts: the ones below it are special in many vocabularies."""


class Job(NamedTuple):
    """One request."""

    prompt: list[int] | None
    fields: dict[str, Any]
    """`prompt` as text, or `messages`, where there are no ids."""
    new_tokens: int


def random_lengths(count: int, length: int, range_ratio: float, sigma: float, seed: int) -> list[int]:
    """`range_ratio`: uniform from (1 - r) to (1 + r) times `length`; `sigma`: log-normal around the median `length`,
    with this standard deviation of the logarithm. Neither: all the same. At least 1."""
    random = np.random.default_rng(seed)
    if sigma > 0:
        lengths = length * np.exp(sigma * random.standard_normal(count))
    else:
        lengths = random.uniform((1 - range_ratio) * length, (1 + range_ratio) * length, count)
    return np.maximum(1, lengths.round()).astype(int).tolist()


def random_jobs(lengths: Sequence[int], new_tokens: int, vocab_size: int, seed: int) -> list[Job]:
    first = FIRST_ID if vocab_size > 2 * FIRST_ID else 0
    random = np.random.default_rng(seed + 1)
    return [Job(random.integers(first, vocab_size, length).tolist(), {}, new_tokens) for length in lengths]


def file_jobs(entries: Sequence[Entry], count: int, new_tokens: int | None, default: int, client: Client, seed: int):
    """`count` entries in a random order, the whole file again where it is too short. `new_tokens` goes before what the
    file asks for; `default` is for entries that ask for nothing."""
    order = np.random.default_rng(seed).permutation(len(entries))
    lengths: dict[int, int] = {}
    jobs = []
    for place in range(count):
        index = int(order[place % len(order)])
        if index not in lengths:
            lengths[index] = new_tokens or _length(entries[index], default, client)
        jobs.append(_job(entries[index], lengths[index]))
    return jobs


def _length(entry: Entry, default: int, client: Client) -> int:
    if entry.answer is not None:
        return max(1, len(client.tokenize(entry.answer, add_special_tokens=False)))
    return entry.new_tokens or default


def _job(entry: Entry, new_tokens: int) -> Job:
    if isinstance(entry.prompt, list):
        return Job(entry.prompt, {}, new_tokens)
    fields = {"messages": entry.messages} if entry.messages is not None else {"prompt": entry.prompt}
    return Job(None, fields, new_tokens)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start, ascending: a Poisson process of `rate` a second, the first one at 0. All 0 for an
    infinite rate."""
    if np.isinf(rate):
        return [0.0] * count
    pauses = np.random.default_rng(seed + 2).exponential(1 / rate, count)
    return (pauses.cumsum() - pauses[0]).tolist()
