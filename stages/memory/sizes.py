"""Tokens to blocks: the one rounding that admission, the policy and the decode stage share."""

from __future__ import annotations

from functools import cache
from math import lcm

READ_TOGETHER = 32
"""Kernels read contexts in pieces of at most so many tokens: one that a window begins in is read from its first token.
A multiple of every kernel's tile."""


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def first_seen(stored: int, window: int, block_size: int) -> int:
    """The first block that is read for the token after `stored` ones, or for any later one, by layers that see `window`
    tokens; 0: all."""
    first = max(0, stored - window + 1) if window else 0
    return first // READ_TOGETHER * READ_TOGETHER // block_size


@cache
def most_seen(ahead: int, window: int, block_size: int) -> int:
    """Blocks that layers which see `window` tokens need at most at the same time, wherever in a context `ahead` tokens
    are stored at once: from the first that is read for the first of them to that of the last of them."""
    places = range(window, window + lcm(READ_TOGETHER, block_size))
    return max(blocks_for(stored + ahead, block_size) - first_seen(stored, window, block_size) for stored in places)
