"""`deepinfer-daemon top`: a live view of a running daemon, as a subscriber like any other."""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgpack
import zmq
from rich.live import Live

from deepinfer.clients.discovery import Connection
from deepinfer.clients.keys import use_keys
from deepinfer.daemon.commands import EXIT_FAILED, EXIT_HUNG, EXIT_READY, NoDaemon, connection
from deepinfer.daemon.display import wide_console
from deepinfer.daemon.swap_events import ROUTINE
from deepinfer.daemon.top_frame import EVENTS_SHOWN, frame
from deepinfer.stages.board import FINAL

PATIENCE_SECONDS = 5.0
"""Besides the interval of snapshots, after which a daemon that says nothing is asked for."""


class View:
    """The frame to be shown after each message; None before there are two snapshots. Swaps are in it as counts, so the
    events are those that are not routine."""

    def __init__(self) -> None:
        self._snapshots: deque[dict[str, Any]] = deque(maxlen=2)
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_SHOWN)

    def take(self, topic: str, message: dict[str, Any]) -> None:
        if topic == "metrics":
            self._snapshots.append(message)
            return
        for event in message.get("events", [message]):
            if event["event"] not in ROUTINE and (not self._events or event["seq"] > self._events[-1]["seq"]):
                self._events.append(event)

    def frame(self) -> Any:
        if len(self._snapshots) < 2:
            return None
        before, now = self._snapshots
        return frame(before, now, list(self._events))


def messages(where: Path | Connection) -> Iterator[tuple[str, dict[str, Any]]]:
    """Topic and message, as they come, until the daemon's last event. Raises NoDaemon when there is no daemon."""
    endpoint = where.endpoint if isinstance(where, Connection) else connection(where).metrics_endpoint
    if endpoint is None:
        raise NoDaemon(f"the connection file in {where} names no metrics_endpoint", EXIT_FAILED)
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    if isinstance(where, Connection) and where.curve is not None:
        use_keys(socket, where.curve)
    socket.connect(endpoint)
    for topic in ("metrics", "events", f"replay/{secrets.token_hex(8)}"):
        socket.subscribe(topic)
    patience = PATIENCE_SECONDS
    try:
        while True:
            if not socket.poll(int(patience * 1000)):
                if isinstance(where, Path):
                    connection(where)  # Raises when there is no daemon any more.
                raise NoDaemon(f"nothing is published at {endpoint}", EXIT_HUNG)
            topic, message = socket.recv_string(), msgpack.unpackb(socket.recv())
            patience = message.get("interval_s", patience - PATIENCE_SECONDS) + PATIENCE_SECONDS
            yield topic, message
            if message.get("event") in FINAL:
                return
    finally:
        socket.close()
        context.term()


def show_top(where: Path | Connection, once: bool) -> int:
    """Until Ctrl-C, or for one frame. Returns the exit code."""
    console = wide_console()
    try:
        view = View()
        with contextlib.ExitStack() as stack:
            live = None if once else stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
            for topic, message in messages(where):
                view.take(topic, message)
                shown = view.frame()
                if shown is None or topic != "metrics":
                    continue
                if live is None:
                    console.print(shown, highlight=False)
                    return EXIT_READY
                live.update(shown, refresh=True)
        click.echo(f"the daemon has {message['event']}" + (f": {error}" if (error := message.get("error")) else ""))
    except NoDaemon as error:
        click.echo(str(error))
        return error.code
    except KeyboardInterrupt:
        pass
    return EXIT_READY
