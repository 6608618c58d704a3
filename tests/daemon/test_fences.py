"""What keeps one stage's hands off the blocks of another, and what would happen without it.

Two requests, and a gate that holds a copy or a chunk until the other request has taken new blocks: with every fence in
place both say what they say alone, to the bit; with one fence removed, the same gate makes one of them say something
else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forced_swaps import force_swaps
from leftovers import settled

from deepinfer.daemon.engine import Engine
from deepinfer.stages.memory.entries import State
from deepinfer.stages.messages import PrefillChunk, SwapIn, SwapOut, SwapOutDone

MOVED, OTHER = list(range(1, 26)), list(range(60, 90))
"""Prompts: of the request that is moved out or cancelled, and of the one that runs on."""
FIELDS = {"ignore_eos": True, "logprobs": 1, "temperature": 1.0, "seed": 3}
NEW = {"moved": 60, "other": 100}
PATIENCE = 20.0
GATES = ["before the copy out", "after the copy out", "before the copy in"]


class Scene:
    """Gates in the offload stage of an engine that has room for both requests."""

    def __init__(self) -> None:
        self.gate = ""
        self.late = False
        """Answer before the copy out."""
        self.passed: list[str] = []
        self._postponed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._until: int | None = None
        """Tokens of the other request that a closed gate waits for."""
        self.chunk_out, self.cancelled = threading.Event(), threading.Event()
        self._reached, self._open = threading.Event(), threading.Event()

    def attach(self, engine: Engine) -> None:
        self.host, offload = engine.host, engine.host.offload
        swap_out, swap_in, send = offload._handlers[SwapOut], offload._handlers[SwapIn], offload.send

        def out(message: SwapOut) -> None:
            if not self.late:
                self.hold("before the copy out")
            swap_out(message)
            if self.late:
                self.hold("before the copy out")
            for destination, source in self._postponed:
                destination.copy_(source)
            self._postponed.clear()

        def back(message: SwapIn) -> None:
            self.hold("before the copy in")
            swap_in(message)

        def sending(to: str, message: Any) -> None:
            if isinstance(message, SwapOutDone):
                self.hold("after the copy out")
            send(to, message)

        offload._handlers |= {SwapOut: out, SwapIn: back}
        offload.send = sending
        self._meter(engine.host.decode)

    def _meter(self, decode: Any) -> None:
        """Decode waits for the second request before it goes on with the first, for its cancellation where there is to
        be one, and for a gate that is about to open."""
        work, deliver = decode.work, decode._deliver

        def working() -> bool:
            alone = self.gate and not self.passed and len(self.host.requests) == 1 and self._said() >= 5
            return False if alone or (self.chunk_out.is_set() and not self.cancelled.is_set()) else work()

        def delivering(outcomes: Any) -> None:
            deliver(outcomes)
            if self._until is not None and self._said() >= self._until:
                self._reached.set()
                self._open.wait(PATIENCE)

        decode.work, decode._deliver = working, delivering

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """The offload stage's."""
        pool = self.host.pool.data.untyped_storage().data_ptr()
        if self.late and source.untyped_storage().data_ptr() == pool:
            self._postponed.append((destination, source))
        else:
            destination.copy_(source)

    def hold(self, gate: str) -> None:
        """Until the other request has said 20 tokens more: more than two blocks of 8."""
        if gate != self.gate or self.passed:
            return
        self._until = self._said() + 20
        assert self._reached.wait(PATIENCE), "the other request stands still"
        self.passed.append(gate)
        self._until = None
        self._open.set()

    @property
    def held(self) -> bool:
        """Whether somebody waits at the gate."""
        return self._until is not None

    def _said(self) -> int:
        return sum(len(r.generated) for r in list(self.host.requests.values()) if len(r.prompt) == len(OTHER))


@contextmanager
def scene(model: Path) -> Iterator[tuple[Engine, Scene]]:
    """The prefix cache is off: a free block is then given to the next one who asks."""
    made = Scene()
    settings = {"batch_invariant": True, "block_size": 8, "num_blocks": 96, "prefix_cache": False, "threads": 1}
    with Engine(model, copy=made.copy, prefill_chunk_tokens=16, **settings) as engine:
        made.attach(engine)
        yield engine, made


def start(engine: Engine, prompt: list[int], who: str) -> Any:
    """Returns when it decodes."""
    stream = engine.generate(prompt, max_new_tokens=NEW[who], **FIELDS)
    next(event for event in stream if getattr(event, "ids", ()))
    return stream


def alone(engine: Engine) -> dict[str, Any]:
    prompts = {"moved": MOVED, "other": OTHER}
    return {who: engine.complete(prompt, max_new_tokens=NEW[who], **FIELDS) for who, prompt in prompts.items()}


def same(answer: Any, expected: Any) -> bool:
    return answer.ids == expected.ids and answer.logprobs == expected.logprobs


# --- swaps --------------------------------------------------------------------------------------------------------


def swap_once(engine: Engine, made: Scene, gate: str) -> tuple[bool, bool]:
    """One request is swapped out and comes back, past the gate. Whether both said what they say alone."""
    expected = alone(engine)
    made.gate = gate
    other = start(engine, OTHER, "other")
    total = len(MOVED) + NEW["moved"] - 1
    force_swaps(engine, lambda e: e.total == total and e.yielded == 11 and not e.parks and gate not in made.passed)
    moved = engine.generate(MOVED, max_new_tokens=NEW["moved"], **FIELDS)
    answers = moved.result(), other.result()
    assert made.passed == [gate]
    assert answers[0].timings["parks"] == 1
    return same(answers[0], expected["moved"]), same(answers[1], expected["other"])


@pytest.mark.parametrize("gate", GATES)
def test_a_swap_during_which_others_take_blocks_changes_nothing(tiny_path, gate):
    with scene(tiny_path) as (engine, made):
        assert swap_once(engine, made, gate) == (True, True)
        settled(engine)


def free_before_the_copy(engine: Engine, made: Scene) -> None:
    """Not: copy, check, free."""
    decode, ledger = engine.host.decode, engine.host.residency.ledger
    carry_out = decode._carry_out

    def freeing(moves: Any) -> None:
        carry_out(moves)
        for rid in moves.swap_out:
            ledger.release(rid)

    decode._carry_out = freeing


def answer_before_the_copy(engine: Engine, made: Scene) -> None:
    """The request stays away until the copy, so that its blocks are there for the other one."""
    made.late = True
    residency, book = engine.host.residency, engine.host.residency._book
    cost = book.cost

    def dear(entry: Any) -> int:
        return residency.ledger.num_rows + 1 if entry.state is State.SWAPPED and not made.passed else cost(entry)

    book.cost = dear


def step_while_it_is_copied(engine: Engine, made: Scene) -> None:
    """From when the copy is made until its answer comes: steps before the copy would be part of it."""
    residency = engine.host.residency
    step = residency.step

    def stepping() -> Any:
        decided = step()
        for entry in residency.entries.values() if made.held else ():
            room = residency.ledger.held(entry.rid) * residency.block_size
            if entry.state is State.SWAPPING_OUT and entry.rid not in decided.moves.swap_out and room > entry.cached:
                decided.rows.append(entry.rid)
        return decided

    residency.step = stepping


def run_before_it_is_back(engine: Engine, made: Scene) -> None:
    decode, entries = engine.host.decode, engine.host.residency.entries
    carry_out = decode._carry_out

    def hasty(moves: Any) -> None:
        carry_out(moves)
        for rid in moves.swap_in:
            entries[rid].state = entries[rid].state_before_swap

    decode._carry_out = hasty


@pytest.mark.parametrize(
    ("without", "gate"),
    [
        (free_before_the_copy, "before the copy out"),
        (answer_before_the_copy, "before the copy out"),
        (step_while_it_is_copied, "after the copy out"),
        (run_before_it_is_back, "before the copy in"),
    ],
)
def test_without_the_fence_the_request_that_was_moved_says_something_else(tiny_path, without, gate):
    """The control arm of the test above."""
    with scene(tiny_path) as (engine, made):
        without(engine, made)
        assert swap_once(engine, made, gate) == (False, True)


# --- chunks -------------------------------------------------------------------------------------------------------


def cancel_in_a_chunk(engine: Engine, made: Scene) -> bool:
    """A request is cancelled while a chunk of it is out, and others decode meanwhile, as on a device where they do. The
    chunk writes when they have taken blocks. Whether the other one says what it says alone."""
    expected = alone(engine)["other"]
    engine.host.decode._overlap = True
    made.gate = "before the chunk"
    other = start(engine, OTHER, "other")
    chunk = engine.host.prefill._handlers[PrefillChunk]

    def held(message: PrefillChunk) -> None:
        made.chunk_out.set()
        assert made.cancelled.wait(PATIENCE)
        made.hold("before the chunk")
        chunk(message)

    engine.host.prefill._handlers[PrefillChunk] = held
    moved = engine.generate(MOVED[:16], max_new_tokens=NEW["moved"], **FIELDS)
    assert made.chunk_out.wait(PATIENCE)
    moved.cancel()
    assert moved.result().finish_reason == "cancelled"
    made.cancelled.set()
    answer = other.result()
    assert made.passed == ["before the chunk"]
    return same(answer, expected)


def test_a_request_that_is_cancelled_while_its_chunk_is_out_keeps_its_blocks_until_the_chunk_is_done(tiny_path):
    with scene(tiny_path) as (engine, made):
        assert cancel_in_a_chunk(engine, made)
        settled(engine)


def test_blocks_that_are_freed_while_a_chunk_is_out_are_written_under_their_new_owner(tiny_path):
    """The control arm of the test above."""
    with scene(tiny_path) as (engine, made):
        residency: Any = engine.host.residency
        end: Callable[[int], Any] = residency.end

        def freeing(rid: int) -> Any:
            state = end(rid)
            residency.ledger.release(rid)
            return state

        residency.end = freeing
        assert not cancel_in_a_chunk(engine, made)
