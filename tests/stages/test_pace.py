"""How much of a core copies take beside decode steps, with a clock that only moves when somebody waits or copies."""

from __future__ import annotations

import random
import threading

import pytest

from deepinfer.stages import pace as pace_module
from deepinfer.stages.pace import FREE_SLICE_BYTES, SLICE_BYTES, Pace

ROW_BYTES = 300_000


class Time:
    """Stands in the place of the clock and of the event that is waited for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = self

        class Waited(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                if not self.is_set():
                    assert timeout is not None
                    clock.now += timeout
                return self.is_set()

        patch.setattr(pace_module.threading, "Event", Waited)
        patch.setattr(pace_module, "monotonic", lambda: self.now)

    def copy(self, pace: Pace, rows: int, seconds_a_row: float = 30e-6, waits: float = 0.0) -> list[int]:
        """Counts of the slices. `waits`: seconds of every slice in which its thread does not run."""
        counts, covered = [], 0
        for first, count in pace.slices(rows, ROW_BYTES):
            assert first == covered
            assert count >= 1
            covered += count
            counts.append(count)
            self.now += count * seconds_a_row + waits
            pace.took(count * seconds_a_row)
        assert covered == rows
        return counts


@pytest.fixture
def clock(monkeypatch):
    return Time(monkeypatch)


@pytest.mark.parametrize("share", [0.03, 0.06, 0.5])
def test_beside_steps_copies_take_no_more_than_their_share_of_time_however_the_rows_lie(clock, share):
    pace, rng = Pace(share), random.Random(3)
    pace.steps(True)
    began, copied = clock.now, 0
    for _ in range(50):
        rows = rng.randint(1, 60)
        counts = clock.copy(pace, rows)
        assert max(counts) * ROW_BYTES <= SLICE_BYTES
        copied += rows
    last = SLICE_BYTES / ROW_BYTES * 30e-6
    assert share * (clock.now - began) <= 30e-6 * copied <= share * (clock.now - began) + last


def test_while_no_step_runs_copies_wait_for_nothing_and_go_in_larger_slices(clock):
    pace = Pace()
    began = clock.now
    assert clock.copy(pace, 180) == [FREE_SLICE_BYTES // ROW_BYTES] * 3 + [180 - 3 * (FREE_SLICE_BYTES // ROW_BYTES)]
    assert clock.now - began == pytest.approx(180 * 30e-6)


def test_time_in_which_a_copy_does_not_run_is_not_paid_for_by_a_pause(clock):
    pace = Pace()
    pace.steps(True)
    began = clock.now
    slices = len(clock.copy(pace, 30, seconds_a_row=0.0, waits=0.05))
    assert clock.now - began == pytest.approx(slices * 0.05)


def test_a_row_that_is_larger_than_a_slice_is_copied_whole():
    pace = Pace()
    pace.steps(True)
    assert list(pace.slices(3, FREE_SLICE_BYTES + 1)) == [(0, 1), (1, 1), (2, 1)]


def test_a_device_that_copies_while_it_computes_gets_a_run_in_one_piece():
    pace = Pace(1.0)
    pace.steps(True)
    pace.took(1000.0)
    assert list(pace.slices(10_000, ROW_BYTES)) == [(0, 10_000)]


def test_a_pause_ends_when_steps_do():
    pace = Pace()
    pace.steps(True)
    pace.took(3600.0)
    slices = pace.slices(2, ROW_BYTES)
    got: list[tuple[int, int]] = []
    copier = threading.Thread(target=lambda: got.append(next(slices)), daemon=True)
    copier.start()
    copier.join(0.05)
    assert got == []
    pace.steps(False)
    copier.join(30)
    assert got == [(0, 2)]
