"""Tokens to blocks: the one rounding that admission, the policy and the decode stage share."""

from __future__ import annotations


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
