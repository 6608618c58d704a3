"""What must hold after a stress run. Each check is a name and the sentences that say what is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deepinfer.clients import Completion
from deepinfer.daemon.engine import Engine
from deepinfer.daemon.stress.client import Outcome
from deepinfer.daemon.stress.copies import StressCopies
from deepinfer.stages.memory.ledger import LedgerError

SETTLE_SECONDS = 20.0


class Check(NamedTuple):
    name: str
    failures: list[str]

    @property
    def passed(self) -> bool:
        return not self.failures


def outcome_checks(outcomes: Sequence[Outcome], max_parks: int, exhausted_allowed: bool) -> list[Check]:
    """What the clients saw. `exhausted_allowed`: an answer that ends for want of blocks is one."""
    fine = ("length", "kv_exhausted") if exhausted_allowed else ("length",)
    return [
        Check("everyone finishes", [line for outcome in outcomes for line in _ending(outcome, fine)]),
        Check("answers equal the solo run", [f"{_name(o)} {o.wrong}" for o in outcomes if o.wrong]),
        Check("preempted and resumed pair up", [line for outcome in outcomes for line in _pauses(outcome)]),
        Check(f"parks stay at or under {max_parks}", [line for o in outcomes for line in _parks(o, max_parks)]),
    ]


def _name(outcome: Outcome) -> str:
    return f"request {outcome.job.number} (question {outcome.job.question})"


def _ending(outcome: Outcome, fine: tuple[str, ...]) -> Iterator[str]:
    if outcome.reason not in fine and not (outcome.reason == "cancelled" and outcome.cancel_sent):
        yield f"{_name(outcome)} ended with {outcome.reason} {outcome.error}".rstrip()


def judge(outcome: Outcome, alone: Completion) -> str:
    """What differs from the solo run, in ids or in log-probabilities, bit by bit; nothing is "". An answer that was cut
    short must be the beginning of it."""
    got = outcome.answer
    if got is None:
        return ""
    count = len(alone.ids) if outcome.reason == "length" else len(got.ids)
    if got.ids != alone.ids[:count]:
        place = next((i for i, (ours, due) in enumerate(zip(got.ids, alone.ids, strict=False)) if ours != due), count)
        return f"has other ids from token {place} on, after {outcome.parks} parks"
    if got.logprobs != alone.logprobs[: len(got.logprobs)]:
        return f"has the right ids with other log-probabilities, after {outcome.parks} parks"
    return ""


def _pauses(outcome: Outcome) -> Iterator[str]:
    """A request that is cut short while it is out is not resumed."""
    missing = outcome.preempted - outcome.resumed
    if missing not in ((0, 1) if outcome.reason in ("cancelled", "error", "kv_exhausted") else (0,)):
        yield f"{_name(outcome)} was preempted {outcome.preempted} times and resumed {outcome.resumed} times"


def _parks(outcome: Outcome, most: int) -> Iterator[str]:
    if outcome.parks > most:
        yield f"{_name(outcome)} was parked {outcome.parks} times"


def engine_checks(engine: Engine, copies: StressCopies, reserved_rows: int, finished: int) -> list[Check]:
    """What is left in the engine, once it is quiet. `reserved_rows` of the host arena are the stress run's own."""
    host, arena = engine.host, engine.host.arena
    _settle(engine, reserved_rows)
    left = [f"request {rid} is still {entry.state.value}" for rid, entry in host.residency.entries.items()]
    left += [f"the record of request {rid} is still there" for rid in host.requests]
    free, total = host.residency.ledger.available, host.residency.ledger.num_rows
    held = arena.used_bytes - reserved_rows * arena.row_bytes
    budget = (arena.num_rows - reserved_rows) * arena.row_bytes
    touched = len(copies.host_rows) * arena.row_bytes
    ended = host.decode.counters.requests_finished_total
    return [
        Check("nothing is left over", left),
        Check("every block is available", [] if free == total else [f"{free} of {total} blocks are available"]),
        Check("the ledger's books add up", list(_audit(engine))),
        Check("no host memory is held", [] if held == 0 else [f"{held} bytes are held"]),
        Check(
            "the host budget was kept",
            [] if touched <= budget else [f"{touched} bytes of host rows were written, the budget is {budget}"],
        ),
        Check(
            "every request ended once in the engine",
            [] if ended == finished else [f"{finished} requests were asked, {ended} ends were counted"],
        ),
    ]


def _settle(engine: Engine, reserved_rows: int) -> None:
    host = engine.host
    reserved = reserved_rows * host.arena.row_bytes
    give_up = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < give_up:
        if not host.residency.entries and not host.requests and host.arena.used_bytes == reserved:
            return
        time.sleep(0.01)


def _audit(engine: Engine) -> Iterator[str]:
    try:
        engine.host.residency.ledger.audit()
    except LedgerError as error:
        yield str(error)
