"""The engine as admission sees it: a process that can die, and is then followed by another one at other addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deepinfer.stages.blame import Blame
from deepinfer.stages.live import LiveRequest
from deepinfer.stages.messages import Cancel, Drain
from deepinfer.stages.stage import Stage


class EngineAddresses(NamedTuple):
    """Of one engine process: where it writes to admission, and where its decode stage reads."""

    admission: str
    decode: str


class EnginePort:
    """Owned by admission, used in its thread. A request is with an engine from `submit` until it ends or the engine
    dies; while there is no engine, requests wait with admission."""

    def __init__(self, stage: Stage, live: Mapping[int, LiveRequest]) -> None:
        self._stage = stage
        self._live = live
        self._blame = Blame()
        self.up = False
        """The engine has said that it is ready."""
        self.last_words = ""
        """What the engine said of its own death."""

    def connect(self, addresses: EngineAddresses) -> None:
        self.last_words = ""
        self._inbox = self._stage.add_inbox(addresses.admission)
        self._stage.add_outbox("decode", addresses.decode)

    def disconnect(self) -> None:
        """The engine is dead. What it has said is still heard; then its sockets go, and what was meant for it."""
        self._stage.remove_inbox(self._inbox)
        self._stage.remove_outbox("decode")
        self.up = False

    def convict(self, running: Sequence[int]) -> LiveRequest | None:
        """The engine died while it computed these. The one that killed it, if that is known now."""
        open_ones = (self._live[rid] for rid in running if rid in self._live)
        guilty = self._blame.died({live.rid: len(live.generated) for live in open_ones if not live.over})
        return None if guilty is None else self._live[guilty]

    def submit(self, live: LiveRequest) -> None:
        if self.up and not self._blame.holds(live.rid):
            live.submitted = True
            self._stage.send("decode", live.submission())

    def submit_waiting(self) -> None:
        """In order of arrival."""
        for live in self._live.values():
            if not live.submitted and not live.over:
                self.submit(live)

    def moved(self, rid: int) -> None:
        """It has yielded a token, or it has ended."""
        if self._blame.clear(rid):
            self.submit_waiting()

    def cancel(self, live: LiveRequest, reason: str) -> bool:
        """False when no engine has it: then nobody but admission will end it."""
        live.cancelled = live.cancelled or reason
        if live.submitted:
            self._stage.send("decode", Cancel(rid=live.rid, reason=reason))
        return live.submitted

    def drain(self, now: bool) -> None:
        if self.up:
            self._stage.send("decode", Drain(now=now))
