"""The times of one request, on the clock that all processes of a machine share."""

from __future__ import annotations

import time

import msgspec


def monotonic() -> float:
    """Seconds of the clock that all stages share: comparable between the processes of one machine."""
    return time.monotonic()


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. `ttft_s` counts from Submit to the first token; `longest_gap_s` is the longest pause between tokens."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    swapped_s: float = 0.0
    longest_gap_s: float = 0.0
    parks: int = 0


class RequestClock(msgspec.Struct, kw_only=True):
    """When what happened to one request, in seconds of `monotonic`. Decode keeps one for each request; admission keeps
    its own, which goes along when a request is submitted to another engine."""

    submitted: float = msgspec.field(default_factory=monotonic)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    longest_gap: float = 0.0
    prefill: float = 0.0
    parks: int = 0
    swapped: float = 0.0
    parked_since: float | None = None

    def admit(self) -> None:
        if self.admitted is None:
            self.admitted = monotonic()

    def token(self) -> None:
        now = monotonic()
        if self.first_token is None:
            self.first_token = now
        if self.last_token is not None:
            self.longest_gap = max(self.longest_gap, now - self.last_token)
        self.last_token = now

    @property
    def parked(self) -> bool:
        return self.parked_since is not None

    def park(self) -> None:
        self.parks += 1
        self.parked_since = monotonic()

    def unpark(self) -> None:
        if self.parked_since is not None:
            self.swapped += monotonic() - self.parked_since
            self.parked_since = None

    def timings(self) -> Timings:
        self.unpark()
        now = monotonic()
        first = self.first_token
        return Timings(
            queue_s=(self.admitted or now) - self.submitted,
            prefill_s=self.prefill,
            ttft_s=(first or now) - self.submitted,
            decode_s=(self.last_token or now) - first if first is not None else 0.0,
            swapped_s=self.swapped,
            longest_gap_s=self.longest_gap,
            parks=self.parks,
        )
