"""What the residency policy knows of a request: integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class State(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPING_OUT = "swapping_out"
    SWAPPED = "swapped"
    SWAPPING_IN = "swapping_in"


RUNNING = (State.PREFILL, State.DECODE)
IN_TRANSFER = (State.SWAPPING_OUT, State.SWAPPING_IN)


@dataclass(slots=True)
class Entry:
    """One request. Counts are tokens unless they say otherwise."""

    rid: int
    arrival: int
    """Place in the order of arrival; it survives every preemption."""
    length: int
    """Tokens known: the prompt and what was generated."""
    total: int
    """Tokens whose keys and values will ever be stored, if it runs to its limit."""
    priority: int = 0
    turn: int = 0
    """Of a newcomer: lower ones come first. Whose turn it is, admission decides."""
    leader: int | None = None
    """A fork of this request: it waits until the common prompt is stored, and begins with the same blocks."""
    keys: list[bytes] = field(default_factory=list)
    """Of the full blocks of its tokens, as far as they are known; see `prefix`."""
    registered: int = 0
    """Full blocks that the prefix tree was told of."""
    state: State = State.WAITING
    target: int = 0
    """In PREFILL: store this many, then sample."""
    cached: int = 0
    """Tokens whose keys and values are stored, or were while somebody could see them."""
    past: int = 0
    """Blocks at the beginning of its context that no window reaches: it let go of what sliding layers have there."""
    leaving: list[int] = field(default_factory=list)
    """In SWAPPING_OUT: places in its table of the blocks that are being copied."""
    away: list[int] = field(default_factory=list)
    """Places in its table of the blocks that are on the host, in the order in which they went there."""
    state_before_swap: State = State.PREFILL
    last_active: int = 0
    """Turn in which it last ran."""
    parks: int = 0
    """Times it was preempted."""
    yielded: int = 0
    """Tokens it produced in this residency."""
    swap_refused: bool = False
    """The host had no room for it, or the copy failed, and nothing has left the host since."""
    busy: bool = False
    """A PrefillChunk names it: its blocks belong to the prefill stage, or its first token will come from there."""
    ended: bool = False
    """It has finished or was cancelled, but a chunk or a transfer still has its blocks."""

    @property
    def locked(self) -> bool:
        return self.busy or self.state in IN_TRANSFER

    @property
    def phase(self) -> State:
        """PREFILL or DECODE: what it does, or will go on with once it is back."""
        return self.state_before_swap if self.state in (State.SWAPPED, *IN_TRANSFER) else self.state

    @property
    def seniority(self) -> tuple[int, int]:
        """Sorts the one that must not wait first: higher priority, then earlier arrival."""
        return (-self.priority, self.arrival)


def idle_chunks(beside_decode: bool) -> int:
    """How many prefill chunks are computed as one while nobody decodes: fewer and larger matmuls. Where prefill runs
    beside decode no step waits for it anyway, and chunks are as large as they should be."""
    return 1 if beside_decode else 2


@dataclass(frozen=True)
class ResidencyConfig:
    """Bounds of the policy."""

    max_running: int = 64
    """Requests that run, or are on their way, at the same time."""
    prefill_chunk_tokens: int = 256
    idle_chunks: int = 1
    """So many chunks are computed as one while nobody decodes."""
    victims: str = "lru"
    """Who moves out first among equals in priority: lru, smallest or youngest."""
    quantum: int = 4
    """Tokens that a residency yields before the request may be made a victim."""
    max_parks: int = 8
    """A request that was preempted this often comes back with blocks for its whole length, so it never is again."""
    offload_unit: str = "request"
    """request: a victim moves out as a whole. block: as many of its blocks as are needed, the earliest ones first."""
    watermark_blocks: int = 1
    """Of all layers. Kept free beside a resumed request while others run, so that the next token does not push it out
    again."""
    swap: bool = True
    window: int = 0
    """Tokens that the layer with the widest window sees, of those that have one; 0 if none has."""
    recompute: bool = True
    """Without room on the host, drop a victim's blocks and compute them again later."""

    @property
    def largest_chunk(self) -> int:
        """Tokens of a request that are stored at once."""
        return self.prefill_chunk_tokens * self.idle_chunks


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, start + count) of a request's tokens; `last` when its prompt is complete with them."""

    rid: int
    start: int
    count: int
    last: bool
    forks: tuple[int, ...] = ()
    """With `last`: requests with the same prompt whose first token is sampled from it too."""


class OwnCopy(NamedTuple):
    """Copy-on-write: the block that `rid` writes next is shared by forks, and it has been given one of its own."""

    rid: int
    source: int
    destination: int
    """Rows of the pool."""


class Moves(NamedTuple):
    """What `Residency` decided. Each list holds request ids; swaps are to be carried out by the offload stage."""

    swap_out: list[int]
    swap_in: list[int]
    admitted: list[int]
    """Newly in PREFILL with their blocks."""
    recomputed: list[int]
    """Lost their blocks, and what they had on the host; waiting again."""
    exhausted: list[int]
    """Cannot grow and nothing can be moved: to be ended with what they have."""


class Step(NamedTuple):
    rows: list[int]
    """Requests that decode one token, each with a block for it."""
    moves: Moves
    copies: list[OwnCopy]
    """To be carried out first, before the moves and before the step."""
