"""The synchronous client against a server that behaves, and one that does not."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading

import pytest
import zmq
from fake_server import FakeServer

from deepinfer.clients import (
    Accepted,
    Client,
    ClientClosedError,
    ConnectionLostError,
    DeepInferError,
    Done,
    IdleTimeoutError,
    InvalidRequestError,
    NoDaemonError,
    Preempted,
    ProtocolViolationError,
    Resumed,
    Timeouts,
    Token,
)


def test_a_stream_yields_its_events_in_order_and_ends_with_done(client):
    events = list(client.generate("echo hey"))
    assert [type(event) for event in events] == [Accepted, Token, Token, Token, Done]
    assert "".join(event.text for event in events) == "hey"
    assert [event.seq for event in events] == [0, 1, 2, 3, 4]


def test_the_result_holds_the_whole_answer(client):
    completion = client.complete("echo hey", max_new_tokens=8)
    assert completion.text == "hey"
    assert completion.ids == (0, 1, 2)
    assert completion.finish_reason == "stop"
    assert completion.usage["prompt_tokens"] == 3
    assert completion.timings["prefill_s"] == 0.1
    assert (completion.model, completion.seed) == ("fake", 7)


def test_a_stream_that_was_read_in_part_still_gives_the_whole_result(client):
    stream = client.generate("echo hey")
    next(stream)
    next(stream)
    assert stream.result().text == "hey"
    assert stream.result() is stream.result()
    assert list(stream) == []


def test_an_answer_without_streaming_is_one_event_with_the_text(client):
    stream = client.generate("echo hey", stream=False)
    (event,) = list(stream)
    assert isinstance(event, Done)
    assert event.text == stream.result().text == "hey"
    assert stream.result().model == "fake"


def test_options_and_messages_travel_as_named_fields_and_absent_ones_do_not(client, server):
    client.chat([{"role": "user", "content": "echo x"}], temperature=0.5, stop=["a"])
    request = server.requests[-1]
    assert request["messages"] == [{"role": "user", "content": "echo x"}]
    assert request["temperature"] == 0.5
    assert request["stop"] == ["a"]
    assert set(request) == {"v", "op", "id", "messages", "temperature", "stop"}


def test_token_ids_travel_as_a_raw_second_frame(client, server):
    client.complete([1, 2, 70000])
    assert server.second_frames[-1] == struct.pack("<3i", 1, 2, 70000)
    assert "prompt" not in server.requests[-1]


def test_one_answer_calls_return_their_data(client):
    assert client.models() == [{"id": "fake"}]
    assert client.tokenize("four") == [4]
    assert client.detokenize([1, 2]) == "text"
    assert client.metrics() == {"kv_blocks": 3}
    assert client.ping() == {"phase": "ready"}


def test_an_error_instead_of_a_reply_is_raised(client):
    with pytest.raises(DeepInferError, match="still loading") as raised:
        client.status()
    assert raised.value.code == "not_ready"
    assert raised.value.retry is True


def test_a_refused_request_raises_what_the_daemon_said(client):
    stream = client.generate("refuse out_of_range")
    with pytest.raises(DeepInferError) as raised:
        next(stream)
    error = raised.value
    assert (error.code, error.field, error.value) == ("out_of_range", "temperature", "99")
    assert "0 to 10" in error.allowed
    assert not error.retry
    with pytest.raises(DeepInferError):
        stream.result()


def test_an_error_in_mid_stream_comes_after_the_tokens_before_it(client):
    stream = client.generate("fail engine_failed")
    assert [type(next(stream)) for _ in range(2)] == [Accepted, Token]
    with pytest.raises(DeepInferError, match="it broke"):
        next(stream)
    assert stream.text == "a"
    assert client.complete("echo ok").text == "ok"


def test_cancel_ends_a_stream_with_done_and_may_be_repeated(client):
    stream = client.generate("hang ab")
    for event in stream:
        if isinstance(event, Token):
            stream.cancel()
            stream.cancel()
    completion = stream.result()
    assert completion.finish_reason == "cancelled"
    assert completion.text == "ab"
    stream.cancel()


def test_leaving_the_with_block_of_a_stream_cancels_it(client, server):
    with client.generate("hang ab") as stream:
        next(stream)
    assert server.wait_for_op("cancel")["id"] == stream.id
    with pytest.raises(ClientClosedError):
        stream.result()


def test_closing_the_client_cancels_open_streams(server):
    with Client(server.endpoint) as client:
        stream = client.generate("hang a")
        next(stream)
    assert server.wait_for_op("cancel")["id"] == stream.id
    assert stream.result().finish_reason == "cancelled"
    with pytest.raises(ClientClosedError):
        client.generate("echo a")
    client.close()


def test_a_thousand_streams_share_one_connection(client):
    streams = {n: client.generate(f"echo {n:04d}", idle_timeout=30) for n in range(1000)}
    for n, stream in reversed(streams.items()):
        assert stream.result().text == f"{n:04d}"


def test_many_threads_may_use_one_client(client):
    failures = []

    def work(n: int) -> None:
        for turn in range(20):
            if client.complete(f"echo {n}-{turn}").text != f"{n}-{turn}":
                failures.append((n, turn))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_lost_event_is_noticed_and_the_stream_cancelled(client, server):
    with pytest.raises(ProtocolViolationError, match=r"2 \(token\) came where 1 was due"):
        client.complete("skip")
    assert client.complete("echo ok").text == "ok"


def test_a_wrong_event_count_is_noticed(client):
    with pytest.raises(ProtocolViolationError, match="had 10 events, 2 came"):
        client.complete("miscount")


def test_events_and_fields_of_a_newer_daemon_are_passed_over(client):
    assert client.complete("novel").text == "a"


@pytest.mark.parametrize("payload", ["c1", "", "93010203", "80", "81a56576656e74a178", "9301", "83a17602"])
def test_garbage_from_the_daemon_fails_what_is_open_and_not_the_client(client, payload):
    stream = client.generate(f"garbage {payload}")
    with pytest.raises(ProtocolViolationError):
        stream.result()
    assert client.complete("echo ok").text == "ok"


def test_a_stream_that_falls_silent_times_out_and_is_cancelled(client, server):
    stream = client.generate("hang a")
    with pytest.raises(IdleTimeoutError):
        stream.result()
    assert stream.text == "a"
    assert server.wait_for_op("cancel")["id"] == stream.id


def test_a_request_that_is_never_accepted_times_out(client):
    with pytest.raises(IdleTimeoutError):
        client.complete("silent", idle_timeout=0.05)


def test_the_idle_timeout_does_not_run_while_a_request_is_preempted(client):
    events = list(client.generate("pause 0.5", idle_timeout=0.1))
    assert [type(event) for event in events[2:4]] == [Preempted, Resumed]
    assert client.complete("pause 0").preemptions == 1


def test_the_idle_timeout_does_not_run_while_a_request_waits_for_its_first_token(client):
    stream = client.generate("hang", idle_timeout=0.05)
    next(stream)
    timer = threading.Timer(0.4, stream.cancel)
    timer.start()
    assert stream.result().finish_reason == "cancelled"
    timer.join()


def test_nobody_at_the_endpoint_is_a_clear_error(tmp_path):
    with pytest.raises(NoDaemonError, match=r"no daemon answers at ipc://.*/none within 0.2 s"):
        Client(f"ipc://{tmp_path}/none", timeouts=Timeouts(connect=0.2))


def test_a_daemon_that_does_not_answer_is_a_clear_error(server):
    server.deaf = True
    with pytest.raises(NoDaemonError, match=r"within 0\.2 s"):
        Client(server.endpoint, timeouts=Timeouts(connect=0.2))


@pytest.mark.parametrize("endpoint", ["tcp://nowhere", "carrier://pigeon", "tcp://127.0.0.1:99999"])
def test_an_endpoint_that_is_none_is_a_clear_error(endpoint):
    with pytest.raises(NoDaemonError, match=endpoint):
        Client(endpoint, timeouts=Timeouts(connect=0.2))


def test_a_daemon_that_dies_fails_open_streams_at_once_and_later_ones_in_time(tmp_path):
    endpoint = f"ipc://{tmp_path}/s"
    script = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import time\n"
        f"from fake_server import FakeServer; FakeServer({endpoint!r}); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        with Client(endpoint, timeouts=Timeouts(connect=10.0)) as client:
            client.timeouts = Timeouts(connect=0.2)
            stream = client.generate("hang ab")
            whole = client.generate("silent", stream=False)
            assert [type(next(stream)) for _ in range(3)] == [Accepted, Token, Token]
            process.send_signal(signal.SIGKILL)
            process.wait()
            with pytest.raises(ConnectionLostError):
                stream.result()
            with pytest.raises(ConnectionLostError):
                whole.result()
            with pytest.raises(NoDaemonError):
                client.complete("echo a", stream=False)
    finally:
        process.kill()
        process.wait()


def error_of(client: Client, prompt: str) -> DeepInferError | None:
    """Until the client has noticed the break, what it sends is lost with the old connection."""
    try:
        client.complete(prompt)
    except DeepInferError as error:
        return error
    return None


def test_the_client_finds_a_daemon_that_came_back(tmp_path):
    endpoint = f"ipc://{tmp_path}/s"
    first = FakeServer(endpoint)
    with Client(endpoint) as client:
        assert client.complete("echo a").text == "a"
        first.close()
        with FakeServer(endpoint) as second:
            while error_of(client, "echo b") is not None:
                pass
            assert second.requests[-1]["prompt"] == "echo b"


def test_requests_made_while_nobody_is_there_are_not_sent_later(tmp_path):
    endpoint = f"ipc://{tmp_path}/s"
    first = FakeServer(endpoint)
    with Client(endpoint, timeouts=Timeouts(connect=0.2, call=0.2)) as client:
        first.close()
        while not isinstance(error_of(client, "echo late"), NoDaemonError):
            pass
        with FakeServer(endpoint) as second:
            client.timeouts = Timeouts(call=5.0)
            client.ping()
            assert [request["op"] for request in second.requests] == ["ping"]


def test_inproc_works_with_a_shared_context():
    context = zmq.Context()
    with FakeServer("inproc://fake", context) as server:
        with Client("inproc://fake", context=context) as client:
            assert client.complete("echo a").text == "a"
        assert not context.closed
        assert server.requests
    context.term()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({}, "conflict"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "conflict"),
        ({"prompt": [2**31]}, "invalid_type"),
        ({"prompt": ["a"]}, "invalid_type"),
        ({"prompt": "\ud800"}, "invalid_value"),
        ({"prompt": "a", "seed": 2**64}, "invalid_value"),
        ({"prompt": "a", "model": object()}, "invalid_value"),
        ({"prompt": "a" * (9 * 1024 * 1024)}, "too_large"),
    ],
)
def test_what_cannot_be_sent_is_refused_here_and_the_client_goes_on(client, arguments, code):
    with pytest.raises(InvalidRequestError) as raised:
        client.generate(**arguments)
    assert raised.value.code == code
    assert client.complete("echo ok").text == "ok"
