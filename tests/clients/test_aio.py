"""The asynchronous client. What both clients share is tested with the synchronous one."""

from __future__ import annotations

import asyncio

import pytest
import zmq
from fake_server import QUICK, FakeServer

from deepinfer.clients import (
    Accepted,
    AsyncClient,
    ClientClosedError,
    DeepInferError,
    Done,
    IdleTimeoutError,
    NoDaemonError,
    Preempted,
    ProtocolViolationError,
    Timeouts,
    Token,
)


def run(server, body, timeouts=QUICK):
    async def main():
        async with AsyncClient(server.endpoint, timeouts=timeouts) as client:
            return await asyncio.wait_for(body(client), 20)

    return asyncio.run(main())


def test_a_stream_yields_its_events_in_order_and_ends_with_done(server):
    async def body(client):
        return [event async for event in client.generate("echo hey")]

    events = run(server, body)
    assert [type(event) for event in events] == [Accepted, Token, Token, Token, Done]
    assert "".join(event.text for event in events) == "hey"


def test_a_thousand_streams_share_one_connection(server):
    async def body(client):
        return await asyncio.gather(*(client.complete(f"echo {n}") for n in range(1000)))

    # Not about silence: with the quick time-outs a busy machine's pause of 0.3 s would end a stream.
    assert [completion.text for completion in run(server, body, Timeouts())] == [str(n) for n in range(1000)]


def test_one_answer_calls_return_their_data_or_raise(server):
    async def body(client):
        assert await client.models() == [{"id": "fake"}]
        assert await client.tokenize("four") == [4]
        assert await client.detokenize([1]) == "text"
        assert await client.metrics() == {"kv_blocks": 3}
        assert (await client.chat([{"role": "user", "content": "a"}])).text == ""
        with pytest.raises(DeepInferError, match="still loading"):
            await client.status()

    run(server, body)


def test_cancel_ends_a_stream_with_done(server):
    async def body(client):
        stream = client.generate("hang ab")
        async for event in stream:
            if isinstance(event, Token):
                stream.cancel()
        return await stream.result()

    assert run(server, body).finish_reason == "cancelled"


def test_a_cancelled_task_cancels_its_stream(server):
    async def body(client):
        task = asyncio.create_task(client.complete("hang a"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not any(request["op"] == "cancel" for request in server.requests):
            await asyncio.sleep(0.005)

    run(server, body)


def test_errors_lost_events_and_silence_raise_as_in_the_synchronous_client(server):
    async def body(client):
        with pytest.raises(DeepInferError, match="it broke"):
            await client.complete("fail engine_failed")
        with pytest.raises(ProtocolViolationError):
            await client.complete("skip")
        with pytest.raises(IdleTimeoutError):
            await client.complete("hang a")
        events = [event async for event in client.generate("pause 0.5", idle_timeout=0.1)]
        assert isinstance(events[2], Preempted)
        assert (await client.complete("echo ok")).text == "ok"

    run(server, body)


def test_closing_cancels_open_streams_and_later_calls_are_refused(server):
    async def main():
        client = await AsyncClient(server.endpoint, timeouts=QUICK).open()
        stream = client.generate("hang a")
        await stream.__anext__()
        await client.close()
        await client.close()
        assert (await stream.result()).finish_reason == "cancelled"
        with pytest.raises(ClientClosedError):
            client.generate("echo a")

    asyncio.run(main())
    assert server.wait_for_op("cancel")


def test_nobody_at_the_endpoint_is_a_clear_error(tmp_path):
    async def main():
        async with AsyncClient(f"ipc://{tmp_path}/none", timeouts=Timeouts(connect=0.2)):
            pass

    with pytest.raises(NoDaemonError, match=r"within 0\.2 s"):
        asyncio.run(main())


def test_inproc_works_with_a_shared_context():
    context = zmq.Context()

    async def main():
        async with AsyncClient("inproc://fake-aio", context=context) as client:
            return (await client.complete("echo a")).text

    with FakeServer("inproc://fake-aio", context):
        assert asyncio.run(main()) == "a"
    context.term()
