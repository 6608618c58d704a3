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
