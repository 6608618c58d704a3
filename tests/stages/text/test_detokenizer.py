"""Deltas of the incremental detokenizer against the full decode, for real and for hostile tokenizers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from deepinfer.stages.text import IncrementalDetokenizer, byte_fallback_ids

Decode = Callable[[list[int]], str]

TEXTS = [
    "Hello, world.  Two  spaces, a tab\tand\nlines\r\n .",
    "你好，世界！今天天气怎么样？我们去公园散步吧。" * 3,
    "👩‍👩‍👧‍👦 family, 👍🏽 thumb, 🏳️‍🌈 flag, é combining, ‍ joiner",
    "مرحبا بالعالم, नमस्ते, สวัสดี",
    "a � sign that was really there: �� and the end �",
]


def stream(decode: Decode, pieces: list[list[int]], byte_ids: frozenset[int] = frozenset()) -> list[str]:
    detokenizer = IncrementalDetokenizer(decode, byte_ids)
    deltas = [detokenizer.push(piece) for piece in pieces]
    return [*deltas, detokenizer.flush()]


def cut(ids: list[int], rng: random.Random) -> list[list[int]]:
    pieces = []
    while ids:
        size = rng.choice([1, 1, 1, 2, 3, 7, 50])
        pieces.append(ids[:size])
        ids = ids[size:]
    return pieces


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.fixture(scope="module")
def smollm2_decode(smollm2) -> Decode:
    return functools.partial(smollm2.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@functools.cache
def byte_fallback_tokenizer() -> Tokenizer:
    """Like Llama 2: a few whole words with a leading-space mark, everything else as byte tokens."""
    words = ["<s>", "▁", "▁Hello", "▁world", "你", "a", "."]
    tokens = words + [f"<0x{byte:02X}>" for byte in range(256)]
    model = BPE({token: id for id, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<s>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_of_real_text_join_to_the_full_decode_for_many_cuts(smollm2, smollm2_decode, text):
    ids = smollm2.encode(text, add_special_tokens=False)
    full = smollm2_decode(ids)
    assert full == text
    for seed in range(8):
        deltas = stream(smollm2_decode, cut(ids, random.Random(seed)))
        assert "".join(deltas) == full


def test_no_replacement_character_is_ever_sent_for_text_that_has_none(smollm2, smollm2_decode):
    text = TEXTS[1] + TEXTS[2] + TEXTS[3]
    ids = smollm2.encode(text, add_special_tokens=False)
    assert any("�" in smollm2_decode([id]) for id in ids), "the text must contain split characters"
    for delta in stream(smollm2_decode, [[id] for id in ids]):
        assert "�" not in delta


def test_a_character_that_is_never_completed_comes_out_at_the_end(smollm2, smollm2_decode):
    ids = smollm2.encode("好", add_special_tokens=False)[:-1]
    deltas = stream(smollm2_decode, [[id] for id in ids])
    assert set(deltas[:-1]) == {""}
    assert deltas[-1] == smollm2_decode(ids) != ""


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=120), seed=st.integers(0, 1000))
def test_deltas_of_random_ids_join_to_the_full_decode(smollm2_decode, ids, seed):
    deltas = stream(smollm2_decode, cut(ids, random.Random(seed)))
    assert "".join(deltas) == smollm2_decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_deltas_of_random_pieces_of_characters_join_to_the_full_decode(smollm2, smollm2_decode, data):
    pieces = smollm2.encode("好👩‍👧é€ก <|im_end|>", add_special_tokens=False)
    ids = data.draw(st.lists(st.sampled_from(pieces), max_size=200))
    deltas = stream(smollm2_decode, [[id] for id in ids])
    assert "".join(deltas) == smollm2_decode(ids)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 262), max_size=120), seed=st.integers(0, 1000))
def test_byte_fallback_streams_join_to_the_full_decode_even_where_bytes_are_wrong(ids, seed):
    tokenizer = byte_fallback_tokenizer()
    byte_ids = byte_fallback_ids(tokenizer.get_vocab())
    assert len(byte_ids) == 256
    deltas = stream(tokenizer.decode, cut(ids, random.Random(seed)), byte_ids)
    assert "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["好", "é€😀", "👩‍👧"])
def test_short_runs_of_right_bytes_stream_without_replacement_characters(text):
    tokenizer = byte_fallback_tokenizer()
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    ids = [tokenizer.token_to_id("▁Hello"), *run] * 20
    byte_ids = byte_fallback_ids(tokenizer.get_vocab())
    deltas = stream(tokenizer.decode, [[id] for id in ids], byte_ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert not any("�" in delta for delta in deltas)


def test_a_leading_space_is_dropped_once_and_not_again_after_the_window_moved():
    tokenizer = byte_fallback_tokenizer()
    ids = [tokenizer.token_to_id(token) for token in ["▁Hello", "▁world", "▁"]] * 60
    deltas = stream(tokenizer.decode, [[id] for id in ids])
    assert "".join(deltas) == tokenizer.decode(ids)
    assert deltas[0] == "Hello"


class CountingDecode:
    """Counts how many ids were decoded in all, which is what a stream costs."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.ids = 0

    def __call__(self, ids: list[int]) -> str:
        self.ids += len(ids)
        return self.decode(ids)


@pytest.mark.parametrize(
    "pattern",
    [[0xE4], [0x80], [0xF0, 0x9F], [0xE4, 0xBD, 0xA0], [0xF0, 0x9F, 0x98, 0x80, 0xC3], [0xE4, None], [None]],
)
def test_the_cost_of_a_hostile_stream_of_partial_characters_grows_linearly(pattern):
    def lossy(ids: list[int]) -> str:
        return bytes(id for id in ids if id < 256).decode("utf-8", "replace")

    ids = [256 if byte is None else byte for byte in (pattern * 8000)[:8000]]
    decode = CountingDecode(lossy)
    assert "".join(stream(decode, [[id] for id in ids])) == lossy(ids)
    assert decode.ids < 100 * len(ids)


def test_silent_ids_after_an_open_character_do_not_make_the_window_grow():
    def lossy(ids: list[int]) -> str:
        return bytes(id for id in ids if id < 256).decode("utf-8", "replace")

    ids = [0xE4, *[256] * 4000, 0xBD, *[256] * 4000, 0xA0]
    decode = CountingDecode(lossy)
    assert "".join(stream(decode, [[id] for id in ids])) == "你"
    assert decode.ids < 100 * len(ids)


def test_every_token_of_a_vocabulary_may_begin_and_end_inside_a_character():
    pieces = [b"\xbd\xa0\xe4", b"\xa5\xbd\xe4", b"\x98\x80\xf0\x9f", b"x\xe4"]

    def lossy(ids: list[int]) -> str:
        return b"".join(pieces[id] for id in ids).decode("utf-8", "replace")

    rng = random.Random(7)
    ids = [rng.choice([0, 0, 0, 1, 2, 3]) for _ in range(4000)]
    decode = CountingDecode(lossy)
    assert "".join(stream(decode, [[id] for id in ids])) == lossy(ids)
    assert decode.ids < 100 * len(ids)


def test_8000_byte_fallback_tokens_in_one_run_are_decoded_once():
    tokenizer = byte_fallback_tokenizer()
    byte_ids = byte_fallback_ids(tokenizer.get_vocab())
    ids = [tokenizer.token_to_id("<0xE4>")] * 8000
    decode = CountingDecode(tokenizer.decode)
    assert "".join(stream(decode, [[id] for id in ids], byte_ids)) == tokenizer.decode(ids)
    assert decode.ids <= 2 * len(ids)
