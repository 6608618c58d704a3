"""What an engine must hold when it has nothing to do: nothing."""

from __future__ import annotations

import time

from deepinfer.daemon.engine import Engine


def settled(engine: Engine) -> None:
    """Nothing is held by anyone: no block, no host byte, no record."""
    give_up = time.monotonic() + 20
    host = engine.host
    while time.monotonic() < give_up:
        if not host.residency.entries and not host.requests and host.arena.used_bytes == 0:
            break
        time.sleep(0.01)
    host.residency.ledger.audit()
    assert host.residency.entries == {}
    assert host.requests == {}
    assert host.residency.ledger.available == host.plan.num_blocks
    assert host.arena.used_bytes == 0


def forgotten(engine: Engine) -> None:
    """Admission has no request any more. A client may read the last event a moment before it is forgotten."""
    give_up = time.monotonic() + 20
    while len(engine.admission.table) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert engine.admission.table.by_choice == {}
    assert len(engine.admission.table) == 0
