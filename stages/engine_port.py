"""The engine as admission sees it: a process that can die, and is then followed by another one at other addresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deepinfer.stages.blame import Blame
from deepinfer.stages.choice import Choice
from deepinfer.stages.live import LiveRequest
from deepinfer.stages.messages import Cancel, Drain
from deepinfer.stages.stage import Stage


class EngineAddresses(NamedTuple):
    """Of one engine process: where it writes to admission, and where its decode stage reads."""

    admission: str
    decode: str


class EnginePort:
    """Owned by admission, used in its thread. `live` has the open requests by the ids of their choices. A choice is
    with an engine from `submit` until it ends or the engine dies; while there is no engine, it waits with admission."""

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

    def convict(self, running: Sequence[int]) -> tuple[LiveRequest, Choice] | None:
        """The engine died while it computed these. The one that killed it, if that is known now."""
        computed = [(self._live[rid], self._live[rid].choice(rid)) for rid in running if rid in self._live]
        open_ones = [choice for live, choice in computed if choice in live.unfinished and not live.over]
        guilty = self._blame.died({choice.rid: len(choice.generated) for choice in open_ones})
        if guilty is None:
            return None
        live = self._live[guilty]
        for choice in live.choices:  # One ends all of them.
            self._blame.clear(choice.rid)
        return live, live.choice(guilty)

    def submit(self, live: LiveRequest) -> None:
        if not self.up:
            return
        choices = [c for c in live.unfinished if not c.submitted and not self._blame.holds(c.rid)]
        for submission in live.submissions(choices):
            self._stage.send("decode", submission)
        for choice in choices:
            choice.submitted = True

    def submit_waiting(self) -> None:
        """In order of arrival."""
        for live in dict.fromkeys(self._live.values()):
            if not live.over:
                self.submit(live)

    def moved(self, rid: int) -> None:
        """It has yielded a token, or it has ended."""
        if self._blame.clear(rid):
            self.submit_waiting()

    def cancel(self, choices: Iterable[Choice], reason: str) -> list[Choice]:
        """Returns those that no engine has: nobody but admission will end them."""
        choices = list(choices)
        for choice in choices:
            choice.cancelled = choice.cancelled or reason
            if choice.submitted:
                self._stage.send("decode", Cancel(rid=choice.rid, reason=reason))
        return [choice for choice in choices if not choice.submitted]

    def drain(self, now: bool) -> None:
        if self.up:
            self._stage.send("decode", Drain(now=now))
