"""The bytes of every message, as the client writes and reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.clients import DeepInferError, Done, Logprob
from deepinfer.clients.streams import StreamState
from deepinfer.clients.wire import pack_request, unpack_event

GOLDEN = Path(__file__).parent / "golden"
REQUESTS = json.loads((GOLDEN / "requests.json").read_text(encoding="utf-8"))
EVENTS = json.loads((GOLDEN / "events.json").read_text(encoding="utf-8"))
BY_NAME = {event["name"]: event for event in EVENTS}


@pytest.mark.parametrize("golden", [r for r in REQUESTS if "client" in r], ids=lambda golden: golden["name"])
def test_a_request_is_written_in_exactly_these_bytes(golden):
    client = golden["client"]
    frames = pack_request(golden["op"], client["id"], client["fields"], client.get("ids"))
    assert [frame.hex() for frame in frames] == golden["frames"]


@pytest.mark.parametrize("golden", EVENTS, ids=lambda golden: golden["name"])
def test_an_event_in_exactly_these_bytes_is_read_as_this_map(golden):
    assert unpack_event([bytes.fromhex(golden["hex"])]) == golden["map"]


def feed(state: StreamState, name: str):
    return state.feed(unpack_event([bytes.fromhex(BY_NAME[name]["hex"])]))


def test_the_golden_events_of_a_request_that_does_not_stream_make_a_completion():
    state = StreamState(streaming=False)
    event = feed(state, "done of a request that does not stream")
    assert isinstance(event, Done)
    completion = state.completion()
    assert (completion.text, completion.ids, completion.finish_reason) == ("xy", (5, 9), "length")
    assert completion.usage == {
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 5,
    }
    assert completion.logprobs == (Logprob(5, -0.5, ((5, -0.5), (9, -1.25))),)
    assert (completion.model, completion.seed) == ("m", 42)
    assert completion.timings["longest_gap_s"] == 0.125


def test_the_golden_events_of_a_stream_make_a_completion():
    state = StreamState(streaming=True)
    for name in ("accepted", "token", "preempted", "resumed", "done"):
        assert not state.ended
        feed(state, name)
    completion = state.completion()
    assert (completion.text, completion.ids, completion.stop) == ("é", (5, 300), "\n\n")
    assert completion.preemptions == 1


def test_the_golden_events_of_several_choices_make_as_many_answers():
    state = StreamState(streaming=True)
    for name in ("accepted with several choices", "token of a choice", "preempted choice", "resumed choice"):
        event = feed(state, name)
        assert getattr(event, "choice", 1) == 1
    assert (state.text, state.may_be_quiet) == ("", False)
    done = feed(state, "done with several choices")
    completion = state.completion()
    assert done.choices == completion.choices
    assert [(c.text, c.ids, c.seed, c.stop) for c in completion.choices] == [
        ("", (), 42, "\n\n"),
        ("é", (5, 300), 43, None),
    ]
    assert (completion.text, completion.finish_reason, completion.stop) == ("", "stop", "\n\n")
    assert completion.usage["completion_tokens"] == 4

    state = StreamState(streaming=False)
    feed(state, "done with several choices that do not stream")
    assert [(c.text, c.ids, c.seed) for c in state.completion().choices] == [("xy", (5, 9), 42), ("xz", (5, 10), 43)]
    assert [len(c.logprobs) for c in state.completion().choices] == [1, 0]


def test_a_golden_refusal_becomes_an_exception_with_all_its_parts():
    with pytest.raises(DeepInferError) as raised:
        feed(StreamState(streaming=True), "error that refuses a request")
    error = raised.value
    assert (error.code, error.field, error.value, error.retry) == (
        "out_of_range",
        "temperature",
        "99",
        False,
    )
    with pytest.raises(DeepInferError) as raised:
        feed(StreamState(streaming=True), "error with details")
    assert raised.value.details == {"prompt_tokens": 9000, "context": 8192}
