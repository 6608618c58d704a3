"""The actor that every stage is: one inbox, outboxes, a table of handlers, and work to do between messages.

A stage runs in one thread, and every socket it uses is made, used and closed in that thread. Sends never block:
internal queues are unbounded, because what may be in flight is bounded by the policy above them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from deepinfer.stages import messages
from deepinfer.stages.clock import monotonic as monotonic
from deepinfer.stages.messages import EngineFailed, Halt, Message
from deepinfer.stages.sockets import readable

logger = logging.getLogger(__name__)

LINGER_MS = 1000
"""How long a closed socket may try to deliver what was sent: enough for a living peer, and no hang for a dead one."""
MAX_DRAIN = 256
"""Messages taken from the inbox before work gets its turn: neither may starve the other."""


class Stage:
    """Subclasses set `name`, register handlers, and may override `work`, `opened` and `closing`.

    `inbox` is the address that this stage binds; `outboxes` maps stage names to the addresses that they bind.
    """

    name = "stage"

    def __init__(self, context: zmq.Context, inbox: str, outboxes: Mapping[str, str]) -> None:
        self.context = context
        self._inbox_address = inbox
        self._outbox_addresses = dict(outboxes)
        self._handlers: dict[type, Callable[[Any], None]] = {Halt: self._on_halt}
        self._thread: threading.Thread | None = None
        self._running = False
        self._sockets: list[zmq.Socket] = []
        self._inboxes: set[zmq.Socket] = set()
        self._outboxes: dict[str, zmq.Socket] = {}
        self.progress = 0
        """Moves whenever this stage does something: what a watchdog looks at."""
        self._waits = False
        """For a message: it has nothing to do."""
        self.failure: BaseException | None = None

    def on(self, message_type: type, handler: Callable[[Any], None]) -> None:
        self._handlers[message_type] = handler

    def start(self) -> None:
        """Run the loop in a thread of its own; returns when the inbox is bound."""
        bound = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bound,), name=f"stage-{self.name}", daemon=True)
        self._thread.start()
        bound.wait()
        if self.failure is not None:
            raise self.failure

    def join(self, timeout: float | None = None) -> bool:
        """True when the loop has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float | None = None) -> bool:
        """From another thread: let the loop end after its current turn, and wait for it. True when it has ended."""
        if self.alive:
            halting = self.context.socket(zmq.PUSH)
            halting.connect(self._inbox_address)
            halting.send(messages.encode(Halt()))
            self.join(timeout)
            halting.close(linger=0)
        return self.join(0)

    def send(self, to: str, message: Message) -> None:
        """A message to a stage that has ended is dropped: over inproc nobody is there to keep it."""
        try:
            self._outboxes[to].send(messages.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("stage %s has ended: a %s to it is dropped", to, type(message).__name__)

    def pulse(self) -> tuple[bool, int]:
        """Whether it has work, and its progress. From any thread."""
        return not self._waits, self.progress

    def opened(self) -> None:
        """Called in the stage's thread before the first message, to make further sockets."""

    def work(self) -> bool:
        """One turn of work. True means: there is more, do not wait for a message first."""
        return False

    def on_socket(self, socket: zmq.Socket) -> None:
        """A further socket, registered in `opened`, has something to read."""

    def poll_timeout_ms(self) -> int:
        """How long an idle loop may sleep."""
        return 1000

    def closing(self) -> None:
        """Called in the stage's thread after the last message, if `opened` had returned."""

    def failed(self, error: BaseException) -> None:
        """The loop died of `error`: admission is told, so that no client waits for ever."""
        logger.error("stage %s died", self.name, exc_info=error)
        if "admission" in self._outboxes:
            self.send("admission", EngineFailed(error=f"stage {self.name} died: {error!r}"))

    def halt(self) -> None:
        """End the loop after the current turn. Only from inside the stage's own thread; others send `Halt`."""
        self._running = False

    def _on_halt(self, _: Halt) -> None:
        self.halt()

    def _run(self, bound: threading.Event) -> None:
        opened = False
        try:
            self._open()
            opened = True
            bound.set()
            self._loop()
        except BaseException as error:  # noqa: BLE001 - the top of a thread, and foreign code may raise anything
            self.failure = error
            if bound.is_set():  # Before that `start` raises it, and nobody has sent anything yet.
                self.failed(error)
        finally:
            bound.set()
            if opened:
                self.closing()
            for socket in self._sockets:
                socket.close()

    def _open(self) -> None:
        self._poller = zmq.Poller()
        self._running = True
        self.add_inbox(self._inbox_address)
        for stage, address in self._outbox_addresses.items():
            self.add_outbox(stage, address)
        self.opened()

    def add_inbox(self, address: str) -> zmq.Socket:
        """A further PULL socket whose messages go to the same handlers. In the stage's thread."""
        inbox = self.new_socket(zmq.PULL, poll=True)
        inbox.bind(address)
        self._inboxes.add(inbox)
        return inbox

    def add_outbox(self, stage: str, address: str) -> None:
        self._outboxes[stage] = self.new_socket(zmq.PUSH)
        self._outboxes[stage].connect(address)

    def remove_inbox(self, inbox: zmq.Socket) -> None:
        """Handle what has arrived there, then close it: what comes later is never read."""
        while self._running and self._drain(inbox):
            pass
        self._poller.unregister(inbox)
        self._inboxes.discard(inbox)
        self._close(inbox)

    def remove_outbox(self, stage: str) -> None:
        """Drops what has not been delivered."""
        self._close(self._outboxes.pop(stage))

    def _close(self, socket: zmq.Socket) -> None:
        self._sockets.remove(socket)
        socket.close(linger=0)

    def new_socket(self, kind: int, poll: bool = False) -> zmq.Socket:
        """A socket that this stage owns and closes. With `poll`, `on_socket` is called when it is readable."""
        socket = self.context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._sockets.append(socket)
        if poll:
            self._poller.register(socket, zmq.POLLIN)
        return socket

    def _loop(self) -> None:
        more = False
        while self._running:
            self._waits = not more
            ready = self._poller.poll(0 if more else self.poll_timeout_ms())
            self._waits = False
            for socket, _ in ready:
                if socket in self._inboxes:
                    self._drain(socket)
                elif not socket.closed:
                    self.on_socket(socket)
            if self._running:
                more = self.work()

    def _drain(self, inbox: zmq.Socket) -> bool:
        """False when the inbox is empty or the loop is to end; True when there may be more."""
        for _ in range(MAX_DRAIN):
            if not readable(inbox):
                return False
            raw = inbox.recv()
            try:
                message = messages.decode(raw)
            except msgspec.MsgspecError as error:
                logger.error("stage %s dropped a message that is not ours: %s", self.name, error)
                continue
            self.progress += 1
            handler = self._handlers.get(type(message))
            if handler is None:
                logger.error("stage %s has no handler for %s", self.name, type(message).__name__)
                continue
            handler(message)
            if not self._running or inbox.closed:
                return False
        return True
