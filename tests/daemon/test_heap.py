"""When the front gives memory back to the system."""

from __future__ import annotations

import pytest

from deepinfer.daemon import heap
from deepinfer.daemon.heap import GROWTH_BYTES, LATE_SECONDS, SOON_SECONDS, Heap
from deepinfer.stages import heap as trimming

USUAL = 100 << 20


class FakeProcess:
    """`free` of what is `resident` goes back when it is trimmed."""

    def __init__(self) -> None:
        self.resident, self.free = USUAL, 0
        self.trimmed: list[float] = []
        self.now = 0.0

    def malloc_trim(self, _: int) -> None:
        self.trimmed.append(self.now)
        self.resident -= self.free
        self.free = 0


@pytest.fixture
def process(monkeypatch):
    process = FakeProcess()
    monkeypatch.setattr(heap, "resident_bytes", lambda: process.resident)
    monkeypatch.setattr(trimming.ctypes, "CDLL", lambda _: process)
    return process


def looks(heap: Heap, process: FakeProcess, seconds: float) -> None:
    end = process.now + seconds
    while process.now < end:
        heap.look(process.now)
        process.now += 0.5


def test_a_process_of_its_usual_size_is_left_alone(process):
    watched = Heap(USUAL, 0.0)
    process.resident += GROWTH_BYTES
    looks(watched, process, 1000)
    assert process.trimmed == []


def test_what_is_free_again_is_given_back_soon(process):
    watched = Heap(USUAL, 0.0)
    looks(watched, process, 100)
    process.resident, process.free = 300 << 20, 200 << 20
    looks(watched, process, 2 * SOON_SECONDS)
    assert process.resident == USUAL
    looks(watched, process, 1000)
    assert len(process.trimmed) == 1


def test_what_is_in_use_for_long_is_looked_at_ever_more_seldom_and_given_back_in_the_end(process):
    watched = Heap(USUAL, 0.0)
    process.resident = 300 << 20
    looks(watched, process, 10 * LATE_SECONDS)
    pauses = [later - earlier for earlier, later in zip(process.trimmed, process.trimmed[1:], strict=False)]
    assert pauses[:3] == [2 * SOON_SECONDS, 4 * SOON_SECONDS, 8 * SOON_SECONDS]
    assert max(pauses) == LATE_SECONDS
    process.free = 200 << 20
    looks(watched, process, LATE_SECONDS + 1)
    assert process.resident == USUAL
    process.resident, process.free = 300 << 20, 200 << 20
    looks(watched, process, 2 * SOON_SECONDS)
    assert process.resident == USUAL


def test_a_system_without_such_a_call_does_without_it(process, monkeypatch):
    monkeypatch.setattr(trimming.ctypes, "CDLL", lambda _: object())
    process.resident = 300 << 20
    looks(Heap(USUAL, 0.0), process, 100)
    assert process.trimmed == []
