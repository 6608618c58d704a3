"""The messages that stages send one another: small typed structs, msgpack on the wire, never a tensor.

A message that names blocks or payload rows hands over the right to touch them; its answer hands it back.
"""

from __future__ import annotations

import msgspec

from deepinfer.stages.clock import RequestClock, Timings

INTERNAL_VERSION = 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen. Ranges are checked by `stages.protocol` before it gets here."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    max_new_tokens: int = 256
    logprobs: int | None = None
    """None: no log probabilities. n >= 0: that of the chosen token and of the n likeliest."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """Base of everything that travels between stages. `v` is the version of this module."""

    v: int = INTERNAL_VERSION


# admission -> decode


class Fork(msgspec.Struct, frozen=True, array_like=True):
    rid: int
    seed: int
    clock: RequestClock | None = None


class Submit(Message, frozen=True, tag="submit"):
    rid: int
    prompt: bytes
    """int32, little endian. Raw bytes, because a list of 4,096 ids costs 200 times as much to decode."""
    params: SamplingParams
    generated: bytes = b""
    """Tokens that an engine before this one already produced: computed again, not sent again."""
    clock: RequestClock | None = None
    """Its times so far. Parked, because an engine before this one had it: `Resumed` is sent when it runs."""
    priority: int = 0
    cache_salt: str = ""
    """Only requests with the same salt share prefix blocks."""
    turn: int = 0
    """Among newcomers of equal priority, lower ones go first; see `turns`."""
    forks: tuple[Fork, ...] = ()
    """Further requests that begin with the same tokens, and continue with seeds of their own."""


class Cancel(Message, frozen=True, tag="cancel"):
    """Legal in every state, any number of times. `reason` is the finish reason that `Finished` will carry."""

    rid: int
    reason: str = "cancelled"


class Drain(Message, frozen=True, tag="drain"):
    """Stop the engine: at once, or when every request has ended."""

    now: bool = False


# front -> admission


class Reconfigure(Message, frozen=True, tag="reconfigure"):
    """Limits for the requests that come from now on; see `protocol_limits`."""

    limits: dict[str, int]
    log_prompts: bool


# decode -> admission


class TokenItem(msgspec.Struct, frozen=True, array_like=True):
    rid: int
    token_id: int
    index: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Tokens(Message, frozen=True, tag="tokens"):
    """All tokens of one decode step (or of one prefill chunk) in one message."""

    items: list[TokenItem]


class Finished(Message, frozen=True, tag="finished"):
    """The one terminal message of a request. When reason is "error", `code` is one of `protocol_errors` and `error`
    says more."""

    rid: int
    reason: str
    code: str = ""
    error: str = ""
    cached_tokens: int = 0
    timings: Timings = Timings()


class Preempted(Message, frozen=True, tag="preempted"):
    rid: int


class Resumed(Message, frozen=True, tag="resumed"):
    rid: int


class Snapshot(Message, frozen=True, tag="snapshot"):
    """Counters and gauges of the engine, sent several times a second."""

    stats: dict


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """The engine process lives. Of each of its stages: whether it has work, and its progress; empty while it loads."""

    pulses: dict[str, tuple[bool, int]]


class EngineReady(Message, frozen=True, tag="ready"):
    """`pid`: which process it is that is ready."""

    summary: dict
    pid: int = 0


class LoadProgress(Message, frozen=True, tag="progress"):
    what: str
    done: int
    total: int


class EngineFailed(Message, frozen=True, tag="failed"):
    """The engine cannot start or cannot go on. `config_error` is true when the user can mend it."""

    error: str
    config_error: bool = False


class EngineDied(Message, frozen=True, tag="died"):
    """From the front: the engine process is gone. With addresses, a new one has been started that will use them;
    without, none comes after it."""

    error: str
    admission: str = ""
    decode: str = ""
    running: list[int] = []
    """The requests that it was computing."""


class EngineStopped(Message, frozen=True, tag="stopped"):
    pass


# decode <-> prefill


class ChunkItem(msgspec.Struct, frozen=True, array_like=True):
    """Rows [start, start + count) of the tokens of request `rid`; its block table covers them already."""

    rid: int
    start: int
    count: int
    last: bool
    forks: tuple[int, ...] = ()
    """With `last`: requests whose first token is sampled from the same logits."""


class PrefillChunk(Message, frozen=True, tag="chunk"):
    """While it is out, prefill alone writes the blocks of these requests."""

    items: list[ChunkItem]


class ChunkDone(Message, frozen=True, tag="chunk_done"):
    """`sampled` holds the first token of each request whose prompt is now complete."""

    items: list[ChunkItem]
    sampled: list[TokenItem]
    seconds: float
    errors: dict[int, str] = {}
    """Requests of the chunk that cannot go on, and why."""


# decode <-> offload


class SwapOut(Message, frozen=True, tag="swap_out"):
    """Copy these rows of the pool out, behind what is out of the same request already. Decode keeps them untouched
    until the answer, then frees them."""

    rid: int
    blocks: list[int]


class SwapOutDone(Message, frozen=True, tag="swap_out_done"):
    """`error` is empty when the payload is safe; else nothing was kept and the blocks still hold the request."""

    rid: int
    bytes: int = 0
    copies: int = 0
    seconds: float = 0.0
    error: str = ""
    rejected: bool = False
    """True when the byte budget refused it, False with an error when the copy failed."""


class SwapIn(Message, frozen=True, tag="swap_in"):
    """Copy the payload back into these rows, in the order in which it went; it is dropped when it has arrived."""

    rid: int
    blocks: list[int]


class SwapInDone(Message, frozen=True, tag="swap_in_done"):
    rid: int
    bytes: int = 0
    copies: int = 0
    seconds: float = 0.0
    error: str = ""


class CopyMeasured(Message, frozen=True, tag="copy_measured"):
    """How long pool rows take to the host and back, measured once at start; or why that could not be done."""

    bytes: int = 0
    """That went each way."""
    out_seconds: float = 0.0
    in_seconds: float = 0.0
    error: str = ""


class DropPayload(Message, frozen=True, tag="drop"):
    """The request ended while it was swapped out."""

    rid: int


class Halt(Message, frozen=True, tag="halt"):
    """A stage ends its loop."""


AnyMessage = (
    Submit
    | Cancel
    | Drain
    | Reconfigure
    | Tokens
    | Finished
    | Preempted
    | Resumed
    | Snapshot
    | Heartbeat
    | EngineReady
    | LoadProgress
    | EngineFailed
    | EngineDied
    | EngineStopped
    | PrefillChunk
    | ChunkDone
    | SwapOut
    | SwapOutDone
    | SwapIn
    | SwapInDone
    | CopyMeasured
    | DropPayload
    | Halt
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(raw: bytes) -> AnyMessage:
    """Raises msgspec.ValidationError on anything that is not one of ours, and on another version."""
    message = _decoder.decode(raw)
    if message.v != INTERNAL_VERSION:
        raise msgspec.ValidationError(f"internal message version {message.v}, expected {INTERNAL_VERSION}")
    return message
