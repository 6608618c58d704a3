"""The bytes of every message, as the server reads and writes them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deepinfer.stages.clock import Timings
from deepinfer.stages.protocol import Generate, Limits, ProtocolError, decode_request
from deepinfer.stages.protocol_events import ChoiceEnd, StreamEncoder, TokenLogprob, encode_error, encode_reply

GOLDEN = Path(__file__).parent.parent / "clients" / "golden"
REQUESTS = json.loads((GOLDEN / "requests.json").read_text(encoding="utf-8"))
EVENTS = json.loads((GOLDEN / "events.json").read_text(encoding="utf-8"))
TIMINGS = Timings(queue_s=0.25, prefill_s=0.5, ttft_s=0.75, decode_s=2.0, swapped_s=0.0, longest_gap_s=0.125, parks=1)
LOGPROBS = [TokenLogprob(5, -0.5, ((5, -0.5), (9, -1.25)))]


def at(seq: int) -> StreamEncoder:
    encoder = StreamEncoder("a")
    encoder.seq = seq
    return encoder


def written() -> dict[str, bytes]:
    counts = {"prompt_tokens": 3, "cached_tokens": 2}
    end = ChoiceEnd(finish_reason="stop", completion_tokens=2, timings=TIMINGS, seed=42, stop="\n\n")
    whole = msgspec.structs.replace(end, finish_reason="length", stop=None, text="xy", ids=[5, 9], logprobs=LOGPROBS)
    other = msgspec.structs.replace(whole, seed=43, text="xz", ids=[5, 10], logprobs=None)
    refused = ProtocolError(
        "out_of_range",
        "temperature = 99: out of range; allowed: a finite number from 0 to 10",
        field="temperature",
        value="99",
        allowed="a finite number from 0 to 10",
        id="a",
    )
    too_long = ProtocolError("context_exceeded", "too long", id=7, details={"prompt_tokens": 9000, "context": 8192})
    return {
        "accepted": at(0).accepted(prompt_tokens=3, model="m", seed=42, max_new_tokens=16),
        "token": at(1).token("é", [5, 300], 0),
        "token with log probabilities": at(1).token("x", [5], 0, LOGPROBS),
        "token without ids": at(3).token("tail", [], 2),
        "preempted": at(2).preempted(),
        "resumed": at(3).resumed(),
        "done": at(4).done([end], **counts),
        "done of a request that does not stream": at(0).done([whole], **counts, model="m"),
        "accepted with several choices": at(0).accepted(prompt_tokens=3, model="m", seed=42, max_new_tokens=16, n=2),
        "token of a choice": at(1).token("é", [5, 300], 0, choice=1),
        "preempted choice": at(2).preempted(choice=1),
        "resumed choice": at(3).resumed(choice=1),
        "done with several choices": at(4).done([end, msgspec.structs.replace(end, seed=43, stop=None)], **counts),
        "done with several choices that do not stream": at(0).done([whole, other], **counts, model="m"),
        "error that refuses a request": encode_error(refused),
        "error that refuses a request without a readable id": encode_error(
            ProtocolError("malformed", "a request is one msgpack map")
        ),
        "error with details": encode_error(too_long),
        "error that ends a stream": at(2).error(ProtocolError("engine_failed", "the engine died")),
        "reply": encode_reply("tokenize", 8, {"ids": [1, 2], "count": 2}),
        "reply to a call without an id": encode_reply("ping", None, {"phase": "ready"}),
        "reply to cancel": encode_reply("cancel", "a", {"found": True}),
    }


def test_every_golden_event_has_a_writer_and_the_other_way_round():
    assert {event["name"] for event in EVENTS} == written().keys()


@pytest.mark.parametrize("golden", EVENTS, ids=lambda golden: golden["name"])
def test_an_event_is_written_in_exactly_these_bytes(golden):
    assert written()[golden["name"]].hex() == golden["hex"]


@pytest.mark.parametrize("golden", REQUESTS, ids=lambda golden: golden["name"])
def test_a_request_in_exactly_these_bytes_is_read_as_these_values(golden):
    request = decode_request([bytes.fromhex(frame) for frame in golden["frames"]], Limits())
    assert type(request).__name__.lower() == golden["op"]
    for name, value in golden["values"].items():
        read = getattr(request, name)
        if isinstance(read, np.ndarray):
            read = read.tolist()
        assert json.loads(msgspec.json.encode(read)) == value, name
    if isinstance(request, Generate):
        assert request.stream is golden["values"].get("stream", True)


def test_every_operation_has_a_golden_request():
    operations = {"generate", "cancel", "status", "models", "tokenize", "detokenize", "metrics", "ping"}
    assert {golden["op"] for golden in REQUESTS} == operations
