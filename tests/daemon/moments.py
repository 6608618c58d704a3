"""Holds a running engine at a chosen place in the life of its one request, until an event has reached it there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from forced_swaps import force_swaps

from deepinfer.daemon.engine import Engine
from deepinfer.stages.memory.entries import State
from deepinfer.stages.messages import Cancel, Drain, PrefillChunk

CHUNK_OUT = "prefill with its chunk out"
LAST_STEP = "last step"
PLACES = [*(state.value for state in State), CHUNK_OUT, LAST_STEP]
PATIENCE = 30.0


class Moment:
    """One engine, one request at a time. `aim`, send the request, `wait_reached`, cause the event.

    The decode thread stands still at the place until admission has sent a Cancel or a Drain to it, so that this is what
    it hears next; transfers and the chunk stand still until it has been handled. `hit` is where the request was then.
    """

    def __init__(self) -> None:
        self._place = ""
        self._reached = threading.Event()
        self._sent = threading.Event()
        self._handled = threading.Event()
        self.hit = ""

    def attach(self, engine: Engine) -> None:
        """Before the first request; while nothing is aimed at, nothing is held."""
        self._host = engine.host
        decode, prefill, admission = engine.host.decode, engine.host.prefill, engine.admission
        swapped: set[int] = set()
        force_swaps(engine, lambda e: self._wants_swap(e) and e.rid not in swapped and not swapped.add(e.rid))
        for kind, handler in list(decode._handlers.items()):
            decode._handlers[kind] = self._noting(kind, handler)
        decode.work = self._looking(decode.work)
        decode._runner.run = self._in_last_step(decode._runner.run)
        prefill._handlers[PrefillChunk] = self._gated(prefill._handlers[PrefillChunk], CHUNK_OUT)
        send = admission.send

        def sending(to: str, message: Any) -> None:
            send(to, message)
            if isinstance(message, Cancel | Drain):
                self._sent.set()

        admission.send = sending

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """The offload stage's copy."""
        pool = self._host.pool.data.untyped_storage().data_ptr()
        into_pool = destination.untyped_storage().data_ptr() == pool
        if self._place == (State.SWAPPING_IN if into_pool else State.SWAPPING_OUT).value:
            self._handled.wait(PATIENCE)
        destination.copy_(source)

    def aim(self, place: str) -> None:
        self._place, self.hit = place, ""
        for event in (self._reached, self._sent, self._handled):
            event.clear()

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), f"it never came to {self._place}"

    def let_go(self) -> None:
        self._place = ""
        for event in (self._reached, self._sent, self._handled):
            event.set()

    def _wants_swap(self, entry: Any) -> bool:
        return "swap" in self._place and entry.state is State.DECODE and entry.yielded == 2

    def _where(self) -> str:
        entries = list(self._host.residency.entries.values())
        if len(entries) != 1:
            return ""
        return CHUNK_OUT if entries[0].busy else entries[0].state.value

    def _look(self) -> None:
        if self._place and not self._reached.is_set() and self._where() == self._place:
            self._stand_still()

    def _stand_still(self) -> None:
        self._reached.set()
        self._sent.wait(PATIENCE)

    def _noting(self, kind: type, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def handle(message: Any) -> None:
            if kind in (Cancel, Drain):
                self.hit = self.hit or self._where()
            handler(message)
            if kind in (Cancel, Drain):
                self._handled.set()
            self._look()

        return handle

    def _looking(self, work: Callable[[], bool]) -> Callable[[], bool]:
        def looking() -> bool:
            more = work()
            self._look()
            return more

        return looking

    def _gated(self, handler: Callable[[Any], None], place: str) -> Callable[[Any], None]:
        def handle(message: Any) -> None:
            if self._place == place:
                self._handled.wait(PATIENCE)
            handler(message)

        return handle

    def _in_last_step(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def running(spans: Any) -> Any:
            request = spans[0].request
            if self._place == LAST_STEP and request.length == len(request.tokens) - 1:
                self._stand_still()
                self.hit = LAST_STEP
            return run(spans)

        return running
