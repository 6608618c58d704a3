"""Valid requests become typed structs; every wrong field becomes a typed error that names it."""

from __future__ import annotations

import struct

import msgpack
import numpy as np
import pytest

from deepinfer.stages.messages import SamplingParams
from deepinfer.stages.protocol import (
    ERROR_CODES,
    MAX_INTEGER,
    Cancel,
    ChatMessage,
    Detokenize,
    Generate,
    Limits,
    Metrics,
    Models,
    Ping,
    ProtocolError,
    Status,
    Tokenize,
    decode_request,
    is_req,
    to_sampling_params,
)

LIMITS = Limits(vocab_size=1000, max_prompt_ids=50, max_prompt_chars=200, max_messages=4)


def decode(fields: dict, *more: bytes, limits: Limits = LIMITS):
    return decode_request([msgpack.packb(fields), *more], limits)


def generate(**fields):
    return decode({"v": 1, "op": "generate", "id": "a", "prompt": "hi", **fields})


def refusal(frames: list[bytes], limits: Limits = LIMITS) -> ProtocolError:
    with pytest.raises(ProtocolError) as raised:
        decode_request(frames, limits)
    error = raised.value
    assert error.code in ERROR_CODES
    assert error.retry is ERROR_CODES[error.code].retry
    return error


def refused(fields: dict, *more: bytes) -> ProtocolError:
    return refusal([msgpack.packb(fields), *more])


def generate_refused(**fields) -> ProtocolError:
    return refused({"v": 1, "op": "generate", "id": "a", "prompt": "hi", **fields})


def test_a_request_with_every_field_keeps_every_value():
    request = generate(
        model="m",
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=1,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-2,
        frequency_penalty=2.0,
        logit_bias={"5": 100, 6: -100},
        seed=MAX_INTEGER,
        stop=["a", "b"],
        stop_token_ids=[1, 999],
        ignore_eos=True,
        logprobs=20,
        stream=False,
        priority=-100,
        deadline_ms=1,
        add_special_tokens=False,
    )
    assert request == Generate(
        id="a",
        prompt="hi",
        model="m",
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=1.0,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={5: 100.0, 6: -100.0},
        seed=MAX_INTEGER,
        stop=("a", "b"),
        stop_token_ids=(1, 999),
        ignore_eos=True,
        logprobs=20,
        stream=False,
        priority=-100,
        deadline_ms=1,
        add_special_tokens=False,
    )


def test_nil_in_an_optional_field_is_the_same_as_leaving_it_out():
    assert generate(temperature=None, seed=None, messages=None, stop=None) == generate()


def test_one_stop_string_may_be_given_without_a_list():
    assert generate(stop="x").stop == ("x",)


@pytest.mark.parametrize("id", ["a", "x" * 128, 0, MAX_INTEGER])
def test_an_id_is_a_short_string_or_an_integer(id):
    assert decode({"v": 1, "op": "cancel", "id": id}) == Cancel(id=id)


def test_prompts_may_be_ids_in_the_map_ids_in_a_frame_or_messages():
    base = {"v": 1, "op": "generate", "id": 1}
    for request in (decode({**base, "prompt_ids": [1, 2, 999]}), decode(base, struct.pack("<3i", 1, 2, 999))):
        assert request.prompt_ids.dtype == np.dtype("<i4")
        assert request.prompt_ids.tolist() == [1, 2, 999]
    messages = [{"content": "c", "role": "user"}, {"role": "system", "content": ""}]
    request = decode({**base, "messages": messages})
    assert request.messages == (ChatMessage("user", "c"), ChatMessage("system", ""))


def test_every_other_operation_is_decoded():
    assert decode({"v": 1, "op": "status"}) == Status()
    assert decode({"v": 1, "op": "models", "id": 3}) == Models(id=3)
    assert decode({"v": 1, "op": "metrics"}) == Metrics()
    assert decode({"v": 1, "op": "ping"}) == Ping()
    assert decode({"v": 1, "op": "tokenize", "text": ""}) == Tokenize(text="")
    chat = decode({"v": 1, "op": "tokenize", "messages": [{"role": "user", "content": "x"}]})
    assert chat.messages == (ChatMessage("user", "x"),)
    for request in (
        decode({"v": 1, "op": "detokenize", "ids": [4], "skip_special_tokens": False}),
        decode({"v": 1, "op": "detokenize", "skip_special_tokens": False}, struct.pack("<i", 4)),
    ):
        assert isinstance(request, Detokenize)
        assert (request.ids.tolist(), request.skip_special_tokens) == ([4], False)
    assert decode({"v": 1, "op": "detokenize", "ids": []}).ids.tolist() == []


def test_a_req_socket_sends_an_empty_frame_first_and_may_not_stream():
    payload = msgpack.packb({"v": 1, "op": "generate", "id": 1, "prompt": "a", "stream": False})
    assert is_req([b"", payload])
    assert not is_req([payload])
    assert not is_req([b""])
    assert decode_request([b"", payload], LIMITS).stream is False
    ids = msgpack.packb({"v": 1, "op": "generate", "id": 1, "stream": False})
    assert decode_request([b"", ids, struct.pack("<i", 7)], LIMITS).prompt_ids.tolist() == [7]
    error = refusal([b"", msgpack.packb({"v": 1, "op": "generate", "id": 1, "prompt": "a"})])
    assert (error.code, error.field, error.id) == ("conflict", "stream", 1)
    assert "REQ" in error.message


@pytest.mark.parametrize(
    ("fields", "code", "field", "value", "allowed"),
    [
        ({"prompt": ""}, "out_of_range", "prompt", "''", "1 to 200 characters"),
        ({"prompt": "x" * 201}, "too_large", "prompt", "201 characters", "200 characters"),
        ({"prompt": "x" * 2000}, "too_large", "prompt", "bytes", "200 characters"),
        ({"prompt": b"x"}, "invalid_type", "prompt", "b'x'", "string"),
        ({"model": ""}, "out_of_range", "model", "''", "1 to 256"),
        ({"model": 3}, "invalid_type", "model", "3", "string"),
        ({"max_new_tokens": 0}, "out_of_range", "max_new_tokens", "0", "1 to 131072"),
        ({"max_new_tokens": 10**9}, "out_of_range", "max_new_tokens", "1000000000", "131072"),
        ({"max_new_tokens": True}, "invalid_type", "max_new_tokens", "True", "integer"),
        ({"max_new_tokens": 1.0}, "invalid_type", "max_new_tokens", "1.0", "integer"),
        ({"max_new_tokens": "5"}, "invalid_type", "max_new_tokens", "'5'", "integer"),
        ({"min_new_tokens": -1}, "out_of_range", "min_new_tokens", "-1", "0 to"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "conflict", "min_new_tokens", "9", "at most 8"),
        ({"temperature": -0.1}, "out_of_range", "temperature", "-0.1", "0 to 10"),
        ({"temperature": 10.1}, "out_of_range", "temperature", "10.1", "0 to 10"),
        ({"temperature": float("nan")}, "out_of_range", "temperature", "nan", "finite"),
        ({"temperature": float("inf")}, "out_of_range", "temperature", "inf", "finite"),
        ({"temperature": False}, "invalid_type", "temperature", "False", "number"),
        ({"top_k": -1}, "out_of_range", "top_k", "-1", "0 to 2147483647"),
        ({"top_k": 2**31}, "out_of_range", "top_k", "2147483648", "2147483647"),
        ({"top_p": 0}, "out_of_range", "top_p", "0", "above 0 up to 1"),
        ({"top_p": 1.01}, "out_of_range", "top_p", "1.01", "1"),
        ({"min_p": -1}, "out_of_range", "min_p", "-1", "0 to 1"),
        ({"repetition_penalty": 0.0}, "out_of_range", "repetition_penalty", "0.0", "above 0 up to 10"),
        ({"presence_penalty": 2.1}, "out_of_range", "presence_penalty", "2.1", "-2 to 2"),
        ({"frequency_penalty": -float("inf")}, "out_of_range", "frequency_penalty", "-inf", "-2 to 2"),
        ({"logit_bias": {1000: 1}}, "out_of_range", "logit_bias[1000]", "1000", "0 to 999"),
        ({"logit_bias": {"-1": 1}}, "out_of_range", "logit_bias['-1']", "'-1'", "0 to 999"),
        ({"logit_bias": {"१": 1}}, "out_of_range", "logit_bias['१']", "'१'", "0 to 999"),
        ({"logit_bias": {1: 101}}, "out_of_range", "logit_bias[1]", "101", "-100 to 100"),
        ({"logit_bias": {1: float("nan")}}, "out_of_range", "logit_bias[1]", "nan", "-100 to 100"),
        ({"logit_bias": {1: 1, "1": 2}}, "conflict", "logit_bias", "{1: 1, '1': 2}", "once"),
        ({"logit_bias": [1]}, "invalid_type", "logit_bias", "[1]", "map"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "too_large", "logit_bias", "1025", "1024"),
        ({"seed": -1}, "out_of_range", "seed", "-1", "0 to 9007199254740991"),
        ({"seed": 2**53}, "out_of_range", "seed", "9007199254740992", "9007199254740991"),
        ({"seed": 2**63}, "out_of_range", "seed", "9223372036854775808", "9007199254740991"),
        ({"n": 0}, "out_of_range", "n", "0", "1 to 16"),
        ({"n": 17}, "out_of_range", "n", "17", "1 to 16"),
        ({"n": 2.0}, "invalid_type", "n", "2.0", "1 to 16"),
        ({"stop": ""}, "out_of_range", "stop", "''", "1 to 256"),
        ({"stop": []}, "out_of_range", "stop", "[]", "1 to 16"),
        ({"stop": ["a", ""]}, "out_of_range", "stop[1]", "''", "1 to 256"),
        ({"stop": ["a", 3]}, "invalid_type", "stop[1]", "3", "string"),
        ({"stop": ["x" * 257]}, "too_large", "stop[0]", "257", "256"),
        ({"stop": ["a"] * 17}, "too_large", "stop", "17", "16"),
        ({"stop": {"a": 1}}, "invalid_type", "stop", "{'a': 1}", "list"),
        ({"stop_token_ids": [0, 1000]}, "out_of_range", "stop_token_ids[1]", "1000", "999"),
        ({"stop_token_ids": [0] * 65}, "too_large", "stop_token_ids", "65", "64"),
        ({"stop_token_ids": 3}, "invalid_type", "stop_token_ids", "3", "list"),
        ({"ignore_eos": 1}, "invalid_type", "ignore_eos", "1", "true or false"),
        ({"logprobs": 21}, "out_of_range", "logprobs", "21", "0 to 20"),
        ({"stream": "yes"}, "invalid_type", "stream", "'yes'", "true or false"),
        ({"priority": 101}, "out_of_range", "priority", "101", "-100 to 100"),
        ({"deadline_ms": 0}, "out_of_range", "deadline_ms", "0", "1 to 604800000"),
        ({"prompt_ids": [1]}, "conflict", "prompt_ids", None, None),
        ({"messages": [{"role": "user", "content": "x"}]}, "conflict", "messages", None, None),
        ({"echo": True}, "unknown_field", "echo", None, "temperature"),
    ],
)
def test_a_wrong_field_is_refused_by_name_value_and_what_is_allowed(fields, code, field, value, allowed):
    error = generate_refused(**fields)
    assert (error.code, error.field, error.id) == (code, field, "a")
    assert field in error.message
    for part, text in ((value, error.value), (allowed, error.allowed)):
        assert part is None or part in text
        assert part is None or part in error.message
    assert len(error.value or "") <= 90


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt_ids": []}, "out_of_range", "prompt_ids"),
        ({"prompt_ids": [1, 1000]}, "out_of_range", "prompt_ids[1]"),
        ({"prompt_ids": [-1]}, "out_of_range", "prompt_ids[0]"),
        ({"prompt_ids": [2**63]}, "out_of_range", "prompt_ids[0]"),
        ({"prompt_ids": [True]}, "invalid_type", "prompt_ids"),
        ({"prompt_ids": [1.5]}, "invalid_type", "prompt_ids"),
        ({"prompt_ids": [0] * 51}, "too_large", "prompt_ids"),
        ({"messages": []}, "out_of_range", "messages"),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
        ({"messages": [{}]}, "invalid_type", "messages[0]"),
        ({"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
        ({"messages": [{"role": "boss", "content": ""}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "invalid_type", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "", "name": "x"}]},
            "unknown_field",
            "messages[0].name",
        ),
        ({"messages": [{"role": "user", "content": "x"}] * 5}, "too_large", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 101}] * 2}, "too_large", "messages"),
        ({}, "missing_field", "prompt"),
        (
            {"prompt_ids": [1], "add_special_tokens": True},
            "conflict",
            "add_special_tokens",
        ),
    ],
)
def test_wrong_prompts_are_refused(fields, code, field):
    error = refused({"v": 1, "op": "generate", "id": "a", **fields})
    assert (error.code, error.field, error.id) == (code, field, "a")


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "out_of_range"),
        (b"abc", "malformed"),
        (struct.pack("<2i", 1, -1), "out_of_range"),
        (struct.pack("<2i", 1, 1000), "out_of_range"),
        (bytes(51 * 4), "too_large"),
    ],
)
def test_wrong_raw_ids_are_refused(frame, code):
    error = refused({"v": 1, "op": "generate", "id": "a"}, frame)
    assert error.code == code
    assert error.field.startswith("prompt_ids")


def test_a_second_frame_is_refused_where_it_means_nothing():
    assert refused({"v": 1, "op": "ping"}, b"1234").code == "malformed"
    both = refused({"v": 1, "op": "generate", "id": 1, "prompt_ids": [1]}, b"\1\0\0\0")
    assert (both.code, both.field) == ("conflict", "prompt_ids")
    assert refused({"v": 1, "op": "generate", "id": 1, "prompt": "a"}, b"\1\0\0\0").code == "conflict"


@pytest.mark.parametrize(
    ("fields", "code", "field", "id"),
    [
        ({}, "missing_field", "v", None),
        ({"op": "ping", "id": 5}, "missing_field", "v", 5),
        ({"v": 2, "op": "ping", "id": "z"}, "unsupported_version", "v", "z"),
        ({"v": "1", "op": "ping"}, "invalid_type", "v", None),
        ({"v": True, "op": "ping"}, "invalid_type", "v", None),
        ({"v": 1, "id": 5}, "missing_field", "op", 5),
        ({"v": 1, "op": "generat"}, "unknown_op", "op", None),
        ({"v": 1, "op": 7}, "invalid_type", "op", None),
        ({"v": 1, "op": "x" * 1000}, "too_large", "op", None),
        ({"v": 1, "op": "ping", "id": ""}, "out_of_range", "id", None),
        ({"v": 1, "op": "ping", "id": "x" * 129}, "too_large", "id", None),
        ({"v": 1, "op": "ping", "id": -1}, "out_of_range", "id", None),
        ({"v": 1, "op": "ping", "id": 2**53}, "out_of_range", "id", None),
        ({"v": 1, "op": "ping", "id": True}, "invalid_type", "id", None),
        ({"v": 1, "op": "ping", "id": 1.5}, "invalid_type", "id", None),
        ({"v": 1, "op": "cancel"}, "missing_field", "id", None),
        ({"v": 1, "op": "generate", "prompt": "a"}, "missing_field", "id", None),
        ({"v": 1, "op": "cancel", "id": 1, "stream": 2}, "unknown_field", "stream", 1),
        ({"v": 1, "op": "tokenize"}, "missing_field", "text", None),
        ({"v": 1, "op": "detokenize"}, "missing_field", "ids", None),
        ({"v": 1, "op": "detokenize", "ids": [1000]}, "out_of_range", "ids[0]", None),
        (
            {
                "v": 1,
                "op": "tokenize",
                "messages": [{"role": "user", "content": ""}],
                "add_special_tokens": True,
            },
            "conflict",
            "add_special_tokens",
            None,
        ),
    ],
)
def test_wrong_common_fields_and_operations_are_refused(fields, code, field, id):
    error = refused(fields)
    assert (error.code, error.field, error.id) == (code, field, id)


def test_a_misspelled_name_gets_a_suggestion():
    assert "did you mean 'temperature'" in generate_refused(temprature=1).message
    assert "did you mean 'generate'" in refused({"v": 1, "op": "genrate"}).message


def test_what_the_client_left_out_comes_from_the_checkpoint_else_it_is_neutral():
    assert to_sampling_params(generate(), {}, 3, 99) == SamplingParams(seed=3, max_new_tokens=99)
    checkpoint = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
    }
    filled = to_sampling_params(generate(), checkpoint, 3, 12)
    assert filled == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, seed=3, max_new_tokens=12
    )
    assert to_sampling_params(generate(), {**checkpoint, "do_sample": False}, 3, 12).temperature == 0.0


def test_what_the_client_says_wins_over_the_checkpoint():
    checkpoint = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    request = generate(
        temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, seed=0, max_new_tokens=1, logprobs=0
    )
    assert to_sampling_params(request, checkpoint, 3, 99) == SamplingParams(seed=0, max_new_tokens=1, logprobs=0)
