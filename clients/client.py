"""The synchronous client: any number of threads, one connection, one receiving thread."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import zmq

from deepinfer.clients.discovery import Connection, locate
from deepinfer.clients.errors import DeepInferError
from deepinfer.clients.events import Completion, Event, GenerateOptions
from deepinfer.clients.link import Item, Link
from deepinfer.clients.options import (
    Messages,
    Timeouts,
    gave_up,
    generate_fields,
    nobody_answers,
    reply_data,
    stream_patience,
)
from deepinfer.clients.streams import StreamState
from deepinfer.clients.threaded import LinkThread


class Stream:
    """The events of one `generate`, in order; the last is `Done`. Iterating raises DeepInferError on failure.

    Leaving a `with` block cancels what has not ended. One thread iterates; `cancel` may come from any.
    """

    def __init__(self, link: Link, id: int, mailbox: queue.SimpleQueue[Item], streaming: bool, timeouts: Timeouts):
        self.id = id
        self._link = link
        self._mailbox = mailbox
        self._timeouts = timeouts
        self._state = StreamState(streaming)

    @property
    def text(self) -> str:
        """All text that has been read from this stream so far; with `n` over 1, that of the first choice."""
        return self._state.text

    @property
    def ended(self) -> bool:
        return self._state.ended

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._state.ended:
            event = self._feed(self._wait())
            if event is not None:
                return event
        raise StopIteration

    def cancel(self) -> None:
        """Ask for the end, any number of times. The stream still yields what is on its way, then `Done`."""
        self._link.cancel(self.id)

    def result(self) -> Completion:
        """Reads to the end. Raises the error that ended the stream."""
        for _ in self:
            pass
        return self._state.completion()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.abandon(self.id)
        self._state.leave()

    def _wait(self) -> Item:
        while True:
            patience = stream_patience(self._state, self._link, self._timeouts)
            try:
                return self._mailbox.get(timeout=patience)
            except queue.Empty:
                if self._link.up and self._state.may_be_quiet:
                    continue
                self._link.abandon(self.id)
                return gave_up(self._link, patience or 0.0)

    def _feed(self, item: Item) -> Event | None:
        if isinstance(item, DeepInferError):
            raise self._state.fail(item)
        try:
            return self._state.feed(item)
        except DeepInferError:
            self._link.abandon(self.id)
            raise


class Client:
    """A connection to a daemon.

        with Client() as client:
            for event in client.generate("Hello", max_new_tokens=32):
                print(event.text, end="")

    `where`: an endpoint such as `tcp://127.0.0.1:5577`, a connection file, a runtime folder, None for the default
    folder, or what `locate` found. For an encrypted endpoint of another machine, `server_key` is the daemon's public
    key and `key_file` this client's own pair, made with `deepinfer-daemon keys new NAME`. `context`: for `inproc://`
    endpoints. Raises NoDaemonError when nobody answers a ping, AccessDeniedError when the daemon wants other keys.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Connection | None = None,
        *,
        server_key: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        context: zmq.Context | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    ) -> None:
        self.timeouts = timeouts
        self.connection = locate(where, server_key, key_file)
        self._thread = LinkThread(self.connection, context)
        self._link = self._thread.link
        try:
            self.ping(timeouts.connect)
        except DeepInferError:
            self.close()
            raise

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        idle_timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Starts an answer to a text, to token ids, or to chat messages, and returns at once."""
        fields, ids = generate_fields(prompt, messages, options)
        mailbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        id = self._link.request("generate", fields, mailbox, ids)
        timeouts = self.timeouts if idle_timeout is None else self.timeouts.with_idle(idle_timeout)
        return Stream(self._link, id, mailbox, bool(options.get("stream", True)), timeouts)

    def complete(self, prompt: str | Sequence[int] | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to a text or to token ids."""
        with self.generate(prompt, **options) as stream:
            return stream.result()

    def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to chat messages, maps of `role` and `content`."""
        with self.generate(messages=messages, **options) as stream:
            return stream.result()

    def status(self) -> dict[str, Any]:
        return self._call("status")

    def models(self) -> list[dict[str, Any]]:
        return self._call("models")["models"]

    def metrics(self) -> dict[str, Any]:
        return self._call("metrics")

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        return self._call("tokenize", text=text, messages=messages, add_special_tokens=add_special_tokens)["ids"]

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        return self._call("detokenize", ids, skip_special_tokens=skip_special_tokens)["text"]

    def ping(self, timeout: float | None = None) -> dict[str, Any]:
        return self._call("ping", timeout=timeout)

    def close(self) -> None:
        """Cancels open streams, waits a moment for their ends, and closes the connection. Idempotent."""
        for id in self._link.open_streams:
            self._link.cancel(id)
        deadline = time.monotonic() + self.timeouts.close
        while self._link.up and self._link.open_streams and time.monotonic() < deadline:
            time.sleep(0.005)
        self._thread.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self, op: str, ids: Sequence[int] | None = None, timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        mailbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        link = self._link
        id = link.request(op, fields, mailbox, ids)
        patience = timeout if timeout is not None else self.timeouts.call
        try:
            return reply_data(mailbox.get(timeout=patience))
        except queue.Empty:
            raise nobody_answers(link, patience) if op == "ping" else gave_up(link, patience) from None
        finally:
            link.abandon(id)
