"""The asynchronous client: any number of tasks of one event loop, one connection, no thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import zmq

from deepinfer.clients.discovery import Connection, locate
from deepinfer.clients.errors import ClientClosedError, DeepInferError
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


class AsyncStream:
    """`Stream` of `deepinfer.clients.client` for `async for` and `async with`."""

    def __init__(self, link: Link, id: int, mailbox: asyncio.Queue[Item], streaming: bool, timeouts: Timeouts):
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

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._state.ended:
            event = self._feed(await self._wait())
            if event is not None:
                return event
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ask for the end, any number of times. The stream still yields what is on its way, then `Done`."""
        self._link.cancel(self.id)

    async def result(self) -> Completion:
        """Reads to the end. Raises the error that ended the stream."""
        async for _ in self:
            pass
        return self._state.completion()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.abandon(self.id)
        self._state.leave()

    async def _wait(self) -> Item:
        while self._mailbox.empty():
            patience = stream_patience(self._state, self._link, self._timeouts)
            try:
                return await asyncio.wait_for(self._mailbox.get(), patience)
            except TimeoutError:
                if self._link.up and self._state.may_be_quiet:
                    continue
                self._link.abandon(self.id)
                return gave_up(self._link, patience or 0.0)
        return self._mailbox.get_nowait()

    def _feed(self, item: Item) -> Event | None:
        if isinstance(item, DeepInferError):
            raise self._state.fail(item)
        try:
            return self._state.feed(item)
        except DeepInferError:
            self._link.abandon(self.id)
            raise


class AsyncClient:
    """A connection to a daemon, for one event loop.

        async with AsyncClient() as client:
            async for event in client.generate("Hello", max_new_tokens=32):
                print(event.text, end="")

    Arguments are those of `Client`. `async with`, or `await client.open()`, connects.
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
        self._own_context = context is None
        self._given_context = context
        self._link_or_none: Link | None = None

    async def open(self) -> AsyncClient:
        """Connects and raises NoDaemonError when nobody answers a ping."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context() if self._given_context is None else self._given_context
        try:
            link = self._link_or_none = Link(self._context, self.connection, self._wake)
        except DeepInferError:
            self._term()
            raise
        for socket in (link.socket, link.monitor):
            self._loop.add_reader(socket.fileno(), self._pump)
        try:
            await self.ping(self.timeouts.connect)
        except BaseException:
            await self.close()
            raise
        return self

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        idle_timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Starts an answer to a text, to token ids, or to chat messages, and returns at once."""
        fields, ids = generate_fields(prompt, messages, options)
        mailbox: asyncio.Queue[Item] = asyncio.Queue()
        id = self._link.request("generate", fields, mailbox, ids)
        timeouts = self.timeouts if idle_timeout is None else self.timeouts.with_idle(idle_timeout)
        return AsyncStream(self._link, id, mailbox, bool(options.get("stream", True)), timeouts)

    async def complete(
        self, prompt: str | Sequence[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer to a text or to token ids."""
        async with self.generate(prompt, **options) as stream:
            return await stream.result()

    async def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to chat messages, maps of `role` and `content`."""
        async with self.generate(messages=messages, **options) as stream:
            return await stream.result()

    async def status(self) -> dict[str, Any]:
        return await self._call("status")

    async def models(self) -> list[dict[str, Any]]:
        return (await self._call("models"))["models"]

    async def metrics(self) -> dict[str, Any]:
        return await self._call("metrics")

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        data = await self._call("tokenize", text=text, messages=messages, add_special_tokens=add_special_tokens)
        return data["ids"]

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        return (await self._call("detokenize", ids, skip_special_tokens=skip_special_tokens))["text"]

    async def ping(self, timeout: float | None = None) -> dict[str, Any]:
        return await self._call("ping", timeout=timeout)

    async def close(self) -> None:
        """Cancels open streams, waits a moment for their ends, and closes the connection. Idempotent."""
        link = self._link_or_none
        if link is None:
            return
        for id in link.open_streams:
            link.cancel(id)
        deadline = self._loop.time() + self.timeouts.close
        while link.up and link.open_streams and self._loop.time() < deadline:
            await asyncio.sleep(0.005)
        self._link_or_none = None
        for socket in (link.socket, link.monitor):
            self._loop.remove_reader(socket.fileno())
        link.close()
        self._term()

    async def __aenter__(self) -> AsyncClient:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _link(self) -> Link:
        if self._link_or_none is None:
            raise ClientClosedError("this client is not open: use `async with`, or await open()")
        return self._link_or_none

    def _wake(self) -> None:
        self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        if self._link_or_none is not None:
            self._link_or_none.pump()

    def _term(self) -> None:
        if self._own_context:
            self._context.term()

    async def _call(
        self, op: str, ids: Sequence[int] | None = None, timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        mailbox: asyncio.Queue[Item] = asyncio.Queue()
        link = self._link
        id = link.request(op, fields, mailbox, ids)
        patience = timeout if timeout is not None else self.timeouts.call
        try:
            return reply_data(await asyncio.wait_for(mailbox.get(), patience))
        except TimeoutError:
            raise nobody_answers(link, patience) if op == "ping" else gave_up(link, patience) from None
        finally:
            link.abandon(id)
