"""Which layers lie together in a row of the pool, so that sliding layers can let go of theirs and others keep all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepinfer.stages.memory.kind_tables import Kind
from deepinfer.stages.memory.sizes import blocks_for, first_seen, most_seen

MOST_PADDING = 1 / 10
"""Of the layers of either kind: so much room may stay unused, that rows hold more layers and there are fewer tables."""


class LayerGroups(NamedTuple):
    groups: tuple[tuple[int, ...], ...]
    """The layers of each row of a block; empty where all lie in one."""
    kinds: tuple[Kind, ...]
    """Of the rows of a block, in their order."""
    window: int
    """Tokens that the layer with the widest window sees, of those that have one; 0 if none has."""
    padding: int
    """Layers for which the rows of a block have room and that do not exist."""

    @property
    def rows_per_block(self) -> int:
        return sum(kind.rows for kind in self.kinds)

    def describe(self) -> dict[str, int]:
        """Plain values for `status` and `plan`."""
        rows = {slides: sum(kind.rows for kind in self.kinds if kind.slides is slides) for slides in (False, True)}
        return {
            "rows_per_block": self.rows_per_block,
            "sliding_rows": rows[True],
            "window": self.window,
            "padding_layers": self.padding,
        }

    def decoding_rows(self, tokens: int, block_size: int) -> int:
        """What a request holds that has stored so many tokens and decodes."""
        blocks, past = blocks_for(tokens, block_size), first_seen(tokens, self.window, block_size)
        return sum(kind.rows * (blocks - past * kind.slides) for kind in self.kinds)

    def rows_alone(self, tokens: int, block_size: int, chunk: int) -> int:
        """See the function of this name."""
        return rows_alone(self.kinds, self.window, tokens, block_size, chunk)

    def tokens_alone(self, rows: int, most: int, block_size: int, chunk: int) -> int:
        """The most tokens, up to `most`, that a request can have stored in the end in a pool of so many rows."""
        low, high = 0, blocks_for(most, block_size)
        while low < high:
            blocks = (low + high + 1) // 2
            fits = self.rows_alone(blocks * block_size, block_size, chunk) <= rows
            low, high = (blocks, high) if fits else (low, blocks - 1)
        return min(low * block_size, most)


def rows_alone(kinds: Sequence[Kind], window: int, tokens: int, block_size: int, chunk: int) -> int:
    """Rows that a request holds at most at the same time until it has stored so many tokens, at most `chunk` of them at
    once: layers that see everything hold all blocks, those that slide what a chunk sees, stores, and a next token."""
    blocks = blocks_for(tokens, block_size)
    sliding = min(blocks, most_seen(chunk + 1, window, block_size)) if window else blocks
    return sum(kind.rows * (sliding if kind.slides else blocks) for kind in kinds)


def group_layers(windows: Sequence[int]) -> LayerGroups:
    """`windows`: of each layer; 0 sees everything. Layers that slide and layers that do not never share a row."""
    full = [layer for layer, window in enumerate(windows) if not window]
    sliding = [layer for layer, window in enumerate(windows) if window]
    if not full or not sliding:
        return LayerGroups((), (Kind(slides=bool(sliding)),), max(windows), 0)

    by_kind = full, sliding
    sizes = range(1, min(len(full), len(sliding)) + 1)
    size = max(size for size in sizes if all(-len(layers) % size <= MOST_PADDING * len(layers) for layers in by_kind))
    rows = [[tuple(layers[at : at + size]) for at in range(0, len(layers), size)] for layers in by_kind]
    kinds = Kind(len(rows[0])), Kind(len(rows[1]), slides=True)
    return LayerGroups((*rows[0], *rows[1]), kinds, max(windows), sum(-len(layers) % size for layers in by_kind))
