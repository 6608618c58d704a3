"""How one field of a request is read: its msgpack type, its range, and the words that say what is allowed.

Each factory returns a parser `(raw, limits) -> value` that raises `Refused`. A parser decodes straight into
the one type it expects, and looks at the length in a list's or map's header first, so that hostile bytes
never become many objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from deepinfer.stages.protocol_limits import MAX_INTEGER, Limits

T = TypeVar("T")
Bound = int | Callable[[Limits], int]
Parser = Callable[[msgspec.Raw, Limits], Any]
TOKEN_ID = np.dtype("<i4")

_bool = msgspec.msgpack.Decoder(bool)
_int = msgspec.msgpack.Decoder(int)
_float = msgspec.msgpack.Decoder(float)
_str = msgspec.msgpack.Decoder(str)
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ints = msgspec.msgpack.Decoder(list[int])
_bias = msgspec.msgpack.Decoder(dict[int | str, float])
_any = msgspec.msgpack.Decoder()


class Refused(Exception):
    """What is wrong with a field. `path` follows the field's name, `value` replaces the rendered field."""

    def __init__(self, code: str, allowed: str, *, path: str = "", value: str | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.allowed = allowed
        self.path = path
        self.value = value


def decode_as(decoder: msgspec.msgpack.Decoder[T], raw: msgspec.Raw, allowed: str) -> T:
    """Decodes or refuses: wrong type, invalid UTF-8, broken msgpack and too deep nesting are told apart."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError:
        raise Refused("invalid_type", allowed) from None
    except msgspec.DecodeError as error:
        raise Refused("malformed", allowed, value=str(error)) from None
    except RecursionError:
        raise Refused("too_deep", allowed) from None


def header_count(raw: msgspec.Raw | bytes, kind: str) -> int | None:
    """The number of entries that the header of an "array" or "map" announces; None when it is neither."""
    head = bytes(memoryview(raw)[:5])
    fix, wide = {"array": (0x90, 0xDC), "map": (0x80, 0xDE)}[kind]
    if not head:
        return None
    if head[0] & 0xF0 == fix:
        return head[0] & 0x0F
    if head[0] == wide and len(head) >= 3:
        return int.from_bytes(head[1:3], "big")
    if head[0] == wide + 1 and len(head) == 5:
        return int.from_bytes(head[1:5], "big")
    return None


def shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def render(raw: msgspec.Raw | bytes) -> str:
    """A short rendering of any msgpack value for an error message; large ones are only measured."""
    size = len(memoryview(raw))
    if size > 256:
        for kind in ("array", "map"):
            count = header_count(raw, kind)
            if count is not None:
                return f"{kind} of {count} entries"
        return f"value of {size} bytes"
    try:
        return shorten(repr(_any.decode(raw)))
    except (ValueError, RecursionError):
        return f"value of {size} bytes"


def _resolve(bound: Bound, limits: Limits) -> int:
    return bound if isinstance(bound, int) else bound(limits)


def integer(low: int, high: Bound = MAX_INTEGER) -> Parser:
    def parse(raw: msgspec.Raw, limits: Limits) -> int:
        top = _resolve(high, limits)
        allowed = f"an integer from {low} to {top}"
        value = decode_as(_int, raw, allowed)
        if not low <= value <= top:
            raise Refused("out_of_range", allowed)
        return value

    return parse


def number(low: float, high: float, *, above: bool = False) -> Parser:
    """A finite float (or integer) in [low, high], or in (low, high] with `above`."""
    allowed = f"a finite number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"

    def parse(raw: msgspec.Raw, limits: Limits) -> float:
        value = decode_as(_float, raw, allowed)
        if not (low <= value <= high) or (above and value == low):
            raise Refused("out_of_range", allowed)
        return value

    return parse


def boolean() -> Parser:
    return lambda raw, limits: decode_as(_bool, raw, "true or false")


def text(low: int, high: Bound) -> Parser:
    def parse(raw: msgspec.Raw, limits: Limits) -> str:
        top = _resolve(high, limits)
        allowed = f"a UTF-8 string of {low} to {top} characters"
        if len(memoryview(raw)) > 4 * top + 5:
            raise Refused("too_large", allowed)
        value = decode_as(_str, raw, allowed)
        if len(value) > top:
            raise Refused("too_large", allowed, value=f"string of {len(value)} characters")
        if len(value) < low:
            raise Refused("out_of_range", allowed)
        return value

    return parse


def choice(*options: str) -> Parser:
    allowed = "one of " + ", ".join(options)

    def parse(raw: msgspec.Raw, limits: Limits) -> str:
        value = decode_as(_str, raw, allowed)
        if value not in options:
            raise Refused("invalid_value", allowed)
        return value

    return parse


def request_id(raw: msgspec.Raw, limits: Limits) -> str | int:
    allowed = f"a string of 1 to {limits.max_id_chars} characters or an integer from 0 to {MAX_INTEGER}"
    try:
        if is_string(raw):
            return text(1, lambda at: at.max_id_chars)(raw, limits)
        return integer(0)(raw, limits)
    except Refused as refused:
        raise Refused(refused.code, allowed, value=refused.value) from None


def is_string(raw: msgspec.Raw) -> bool:
    lead = memoryview(raw)[0]
    return lead & 0xE0 == 0xA0 or lead in (0xD9, 0xDA, 0xDB)


def elements(raw: msgspec.Raw, low: int, high: int, what: str) -> list[msgspec.Raw]:
    """The undecoded entries of a list of `low` to `high`; the count in its header is checked first."""
    allowed = f"a list of {low} to {high} {what}"
    count = header_count(raw, "array")
    if count is None:
        raise Refused("invalid_type", allowed)
    if count > high:
        raise Refused("too_large", allowed, value=f"list of {count}")
    if count < low:
        raise Refused("out_of_range", allowed)
    return decode_as(_raws, raw, allowed)


def each(parser: Parser, entries: list[msgspec.Raw], limits: Limits) -> tuple:
    values = []
    for index, entry in enumerate(entries):
        try:
            values.append(parser(entry, limits))
        except Refused as refused:
            path = f"[{index}]{refused.path}"
            raise Refused(refused.code, refused.allowed, path=path, value=refused.value or render(entry)) from None
    return tuple(values)


def stops(raw: msgspec.Raw, limits: Limits) -> tuple[str, ...]:
    one = text(1, lambda at: at.max_stop_chars)
    if is_string(raw):
        return (one(raw, limits),)
    what = f"non-empty strings of at most {limits.max_stop_chars} characters, or one such string"
    return each(one, elements(raw, 1, limits.max_stops, what), limits)


def stop_token_ids(raw: msgspec.Raw, limits: Limits) -> tuple[int, ...]:
    entries = elements(raw, 0, limits.max_stop_token_ids, "token ids")
    return each(integer(0, limits.vocab_size - 1), entries, limits)


def token_ids(low: int) -> Parser:
    """A msgpack list of token ids as int32 `[n]`."""

    def parse(raw: msgspec.Raw, limits: Limits) -> np.ndarray:
        allowed = f"a list of {low} to {limits.max_prompt_ids} token ids"
        count = header_count(raw, "array")
        if count is not None and count > limits.max_prompt_ids:
            raise Refused("too_large", allowed, value=f"list of {count}")
        values = decode_as(_ints, raw, allowed)
        if len(values) < low:
            raise Refused("out_of_range", allowed)
        if values and not (min(values) >= 0 and max(values) < limits.vocab_size):
            raise _outside_vocabulary(values, limits)
        return np.array(values, dtype=TOKEN_ID)

    return parse


def raw_token_ids(frame: bytes, low: int, limits: Limits) -> np.ndarray:
    """The second frame, int32 little endian, as int32 `[n]`."""
    allowed = f"a frame of {low} to {limits.max_prompt_ids} token ids, 4 bytes each, int32 little endian"
    if len(frame) % TOKEN_ID.itemsize:
        raise Refused("malformed", allowed, value=f"frame of {len(frame)} bytes")
    if len(frame) > limits.max_prompt_ids * TOKEN_ID.itemsize:
        raise Refused("too_large", allowed, value=f"frame of {len(frame)} bytes")
    ids = np.frombuffer(frame, dtype=TOKEN_ID)
    if len(ids) < low:
        raise Refused("out_of_range", allowed, value="frame of 0 bytes")
    if len(ids) and not (ids.min() >= 0 and ids.max() < limits.vocab_size):
        raise _outside_vocabulary(ids.tolist(), limits)
    return ids


def _outside_vocabulary(values: list[int], limits: Limits) -> Refused:
    at, value = next((i, v) for i, v in enumerate(values) if not 0 <= v < limits.vocab_size)
    allowed = f"token ids from 0 to {limits.vocab_size - 1}"
    return Refused("out_of_range", allowed, path=f"[{at}]", value=str(value))


def logit_bias(raw: msgspec.Raw, limits: Limits) -> dict[int, float]:
    """Keys are token ids, as integers or as decimal strings (JSON-born clients have no integer keys)."""
    allowed = f"a map of at most {limits.max_logit_bias} token ids to finite numbers from -100 to 100"
    count = header_count(raw, "map")
    if count is not None and count > limits.max_logit_bias:
        raise Refused("too_large", allowed, value=f"map of {count} entries")
    bias: dict[int, float] = {}
    given = decode_as(_bias, raw, allowed)
    for key, value in given.items():
        token = int(key) if isinstance(key, int) or (key.isascii() and key.isdigit() and len(key) < 11) else -1
        if not 0 <= token < limits.vocab_size:
            keys = f"token ids from 0 to {limits.vocab_size - 1} as keys"
            raise Refused("out_of_range", keys, path=f"[{shorten(repr(key))}]", value=shorten(repr(key)))
        if not (math.isfinite(value) and -100 <= value <= 100):
            raise Refused("out_of_range", allowed, path=f"[{token}]", value=repr(value))
        bias[token] = value
    if len(bias) != count:
        raise Refused("conflict", "each token id once")
    return bias
