"""Which filled blocks hold which tokens: a radix tree over full blocks, by which prompts share a common beginning.

A node is one full block. Its key is a chained hash (blake2b) of everything up to and including its tokens, so that a
dictionary of keys is the tree, and a match is a walk along the keys of a prompt. Pure Python over integers and digests.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

DIGEST_BYTES = 16


def root_key(*parts: str) -> bytes:
    """Whatever must be equal for two requests to share: model, KV format, the client's salt."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=DIGEST_BYTES).digest()


def chain_keys(parent: bytes, tokens: np.ndarray, block_size: int) -> list[bytes]:
    """The keys of the full blocks of `tokens` (int32 [n]), which follow the block with the key `parent`."""
    keys = []
    raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    width = 4 * block_size
    for first in range(0, len(raw) - width + 1, width):
        parent = hashlib.blake2b(parent + raw[first : first + width], digest_size=DIGEST_BYTES).digest()
        keys.append(parent)
    return keys


@dataclass(slots=True)
class _Node:
    key: bytes
    block: int
    parent: bytes | None
    children: int = 0
    last_used: int = 0
    idle: bool = False
    """No request holds the block."""


class PrefixTree:
    """Owned by the ledger's owner. A block in the tree is either held by requests or idle; idle leaves can be evicted,
    the least recently used first. Whoever holds a node's block holds those of its ancestors, so every idle node can be
    evicted after the idle ones below it."""

    def __init__(self, clock: Iterator[int] | None = None) -> None:
        """`clock`: of another tree, by which both know what was used least recently."""
        self.clock = itertools.count(1) if clock is None else clock
        self._nodes: dict[bytes, _Node] = {}
        self._key_of: dict[int, bytes] = {}
        self._leaves: list[tuple[int, bytes]] = []
        """Heap of (last_used, key) of idle leaves; entries that are out of date are skipped."""
        self.num_idle = 0

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def blocks(self) -> list[int]:
        return list(self._key_of)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known beginning of `keys`."""
        return self.known(itertools.takewhile(self._nodes.__contains__, keys))

    def knows(self, key: bytes) -> bool:
        return key in self._nodes

    def known(self, keys: Iterable[bytes]) -> list[int]:
        """Their blocks; it knows all of them."""
        return [self._nodes[key].block for key in keys]

    def insert(self, key: bytes, parent_block: int | None, block: int) -> int:
        """A held block is filled. Returns the block that stands for `key` from now on: `block`, or another that was
        there first.

        `parent_block` is the block before it in the request's table. Where that one is not in the tree (the request
        came back from the host with blocks of its own), nothing is inserted.
        """
        parent = None if parent_block is None else self._key_of.get(parent_block)
        if parent_block is not None and parent is None:
            return block
        node = self._nodes.get(key)
        if node is not None:
            return node.block
        self._nodes[key] = _Node(key, block, parent, last_used=next(self.clock))
        self._key_of[block] = key
        if parent is not None:
            self._nodes[parent].children += 1
        return block

    def hold(self, block: int) -> None:
        """The first request takes an idle block."""
        node = self._nodes[self._key_of[block]]
        node.idle = False
        self.num_idle -= 1

    def let_go(self, block: int) -> None:
        """The last request that held it has gone."""
        node = self._nodes[self._key_of[block]]
        node.idle, node.last_used = True, next(self.clock)
        self.num_idle += 1
        self._offer(node)

    def oldest(self) -> int | None:
        """When the idle leaf that would be evicted was last used; None when there is none."""
        while self._leaves:
            last_used, key = self._leaves[0]
            node = self._nodes.get(key)
            if node is not None and node.idle and not node.children and node.last_used == last_used:
                return last_used
            heapq.heappop(self._leaves)
        return None

    def evict(self) -> int:
        """Forget the least recently used idle leaf and give its block back. Raises LookupError when there is none."""
        if self.oldest() is None:
            raise LookupError("no idle leaf to evict")
        node = self._nodes[heapq.heappop(self._leaves)[1]]
        self._remove(node)
        return node.block

    def forget(self, block: int) -> list[int]:
        """Take this block and all that follow it out of the tree. Returns those of them that were idle."""
        doomed = {self._key_of[block]: self._nodes[self._key_of[block]]}
        for key, node in self._nodes.items():  # A parent was always inserted before its children.
            if node.parent in doomed:
                doomed[key] = node
        for node in reversed(doomed.values()):
            self._remove(node)
        return [node.block for node in doomed.values() if node.idle]

    def _remove(self, node: _Node) -> None:
        del self._nodes[node.key]
        del self._key_of[node.block]
        self.num_idle -= node.idle
        if node.parent is not None:
            parent = self._nodes[node.parent]
            parent.children -= 1
            self._offer(parent)

    def _offer(self, node: _Node) -> None:
        if node.idle and not node.children:
            heapq.heappush(self._leaves, (node.last_used, node.key))
