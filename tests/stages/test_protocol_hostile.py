"""Whatever bytes come, decoding a request ends in a request or in a ProtocolError, and costs little."""

from __future__ import annotations

import pickle
import struct
import tracemalloc

import msgpack
import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.stages.protocol import Limits, ProtocolError, decode_request
from deepinfer.stages.protocol_events import encode_error

LIMITS = Limits(vocab_size=1000)
VALID = [
    {"v": 1, "op": "generate", "id": "a", "prompt": "hi", "stop": ["x"], "logit_bias": {1: 2.0}, "seed": 3},
    {"v": 1, "op": "generate", "id": 1, "messages": [{"role": "user", "content": "hé"}], "temperature": 0.5},
    {"v": 1, "op": "generate", "id": 1, "prompt_ids": [1, 2, 3], "stop_token_ids": [1, 300], "stream": False},
    {"v": 1, "op": "detokenize", "ids": [1, 2]},
    {"v": 1, "op": "cancel", "id": "a"},
]


def survive(frames: list[bytes]) -> ProtocolError | None:
    """Anything but a ProtocolError escapes from here; what would be sent for it has to be encodable."""
    try:
        decode_request(frames, LIMITS)
    except ProtocolError as error:
        refusal = error
    else:
        return None
    assert msgpack.unpackb(encode_error(refusal))["code"] == refusal.code
    return refusal


@fuzz(500)
@given(frames=st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_never_raise_anything_else(frames):
    survive(frames)


@fuzz(400)
@given(data=st.data())
def test_mutated_requests_never_raise_anything_else(data):
    payload = bytearray(msgpack.packb(data.draw(st.sampled_from(VALID))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        cut = data.draw(st.integers(0, 3))
        payload[at : at + cut] = data.draw(st.binary(max_size=6))
        if not payload:
            break
    survive([bytes(payload)])


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-(2**63), 2**64 - 1), inner),
    max_leaves=8,
)
FIELDS = [
    *("v", "op", "id", "prompt", "prompt_ids", "messages", "model", "max_new_tokens", "min_new_tokens"),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "logprobs"),
    *("stream", "priority", "deadline_ms", "cache_salt", "add_special_tokens"),
]


@fuzz(400)
@given(base=st.sampled_from(VALID), field=st.sampled_from(FIELDS), value=anything)
def test_any_value_in_any_field_never_raises_anything_else(base, field, value):
    survive([msgpack.packb({**base, field: value})])


DEEP = 100_000
HOSTILE = {
    "no frames": ([], "malformed"),
    "an empty frame": ([b""], "malformed"),
    "two empty frames": ([b"", b""], "malformed"),
    "five frames": ([b"", b"\x80", b"", b"", b""], "malformed"),
    "an http request": ([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], "malformed"),
    "a pickle": ([pickle.dumps({"v": 1, "op": "ping"})], "malformed"),
    "json": ([b'{"v": 1, "op": "ping"}'], "malformed"),
    "a list": ([msgpack.packb([1, "ping"])], "malformed"),
    "nil": ([b"\xc0"], "malformed"),
    "two maps in one frame": ([msgpack.packb({"v": 1, "op": "ping"}) * 2], "malformed"),
    "a truncated map": ([msgpack.packb({"v": 1, "op": "ping"})[:-1]], "malformed"),
    "a truncated header": ([b"\xdf\xff"], "malformed"),
    "a map of four billion fields": ([b"\xdf\xff\xff\xff\xff"], "too_large"),
    "a map of 65 fields": ([msgpack.packb({f"f{n}": 1 for n in range(65)})], "too_large"),
    "a field twice": ([b"\x82\xa1v\x01\xa1v\x01"], "malformed"),
    "an integer as key": ([msgpack.packb({1: 1})], "malformed"),
    "bytes as key": ([msgpack.packb({b"v": 1})], "malformed"),
    "a key in invalid utf-8": ([b"\x81\xa2\xff\xfe\x01"], "malformed"),
    "deep lists": ([b"\x81\xa1v" + b"\x91" * DEEP + b"\xc0"], "too_deep"),
    "deep maps": ([b"\x81\xa1v" + b"\x81\xa1a" * DEEP + b"\xc0"], "too_deep"),
    "deep but within the recursion limit": ([b"\x81\xa1v" + b"\x91" * 500 + b"\xc0"], "invalid_type"),
    "9 MiB": ([b"\x81" + bytes(9 * 1024 * 1024)], "too_large"),
    "9 MiB in the second frame": ([msgpack.packb(VALID[0]), bytes(9 * 1024 * 1024)], "too_large"),
    "a reserved byte": ([b"\xc1"], "malformed"),
    "an extension type": ([b"\x82\xa1v\x01\xa2op\xd4\x01\x00"], "invalid_type"),
    "a timestamp": ([b"\x82\xa1v\x01\xa2op\xd6\xff\x00\x00\x00\x00"], "invalid_type"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_is_refused_with_its_code(name):
    frames, code = HOSTILE[name]
    error = survive(frames)
    assert error is not None
    assert error.code == code


def with_prompt(value: bytes) -> list[bytes]:
    head = msgpack.packb({"v": 1, "op": "generate", "id": "a", "prompt": None})
    return [head[:-1] + value]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"\xa2\xff\xfe", "malformed"),
        (b"\xa3\xed\xa0\x80", "malformed"),
        (b"\xc4\x02hi", "invalid_type"),
        (b"\x91" * 600 + b"\xc0", "invalid_type"),
        (b"\xdd\x00\x0f\xff\xff" + b"\x80" * 0xFFFFF, "invalid_type"),
    ],
    ids=["invalid utf-8", "a lone surrogate", "bytes", "nested lists", "a million empty maps"],
)
def test_a_prompt_that_is_no_text_is_refused(value, code):
    error = survive(with_prompt(value))
    assert error is not None
    assert (error.code, error.field, error.id) == (code, "prompt", "a")


@pytest.mark.parametrize("field", ["prompt", "prompt_ids", "messages", "stop", "logit_bias", "unheard_of", "v"])
def test_a_megabyte_of_empty_maps_never_becomes_objects(field):
    maps = b"\xdd\x00\x0f\xff\xff" + b"\x80" * 0xFFFFF
    payload = b"\x84\xa1v\x01\xa2op\xa8generate\xa2id\x01" + msgpack.packb(field) + maps
    if field == "v":
        payload = b"\x81\xa1v" + maps
    survive([payload])
    tracemalloc.start()
    error = survive([payload])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error is not None
    assert peak < 1_000_000


def test_small_fields_may_not_be_large_together_but_a_prompt_may():
    stops = {"v": 1, "op": "generate", "id": 1, "prompt": "a", "stop": ["x" * 70_000]}
    error = survive([msgpack.packb(stops)])
    assert error is not None
    assert error.code == "too_large"
    assert "65536 bytes" in error.message
    assert survive([msgpack.packb({"v": 1, "op": "generate", "id": 1, "prompt": "x" * 1_000_000})]) is None


def test_raw_ids_up_to_the_limit_are_taken():
    payload = msgpack.packb({"v": 1, "op": "generate", "id": 1})
    assert survive([payload, struct.pack("<i", 999) * LIMITS.max_prompt_ids]) is None
    error = survive([payload, struct.pack("<i", 999) * (LIMITS.max_prompt_ids + 1)])
    assert error is not None
    assert error.code == "too_large"
