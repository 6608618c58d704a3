"""Tokens to blocks: the one rounding that admission, the policy and the decode stage share."""

from __future__ import annotations

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
