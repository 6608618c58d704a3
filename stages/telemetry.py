"""What the front tells of its work, to whoever counts and publishes it."""

from __future__ import annotations

from typing import Any

import msgspec

from deepinfer.stages.clock import Timings
from deepinfer.stages.protocol_errors import RequestId


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted request that has ended. Never text, never token ids.

    `finish_reason` is that of its `done`, or "error" (then `code` says which), or "disconnected" when the client went
    away. Seconds as the front saw them: a request without a token has no `ttft_s`, one of a single token no `tpot_s`.
    `timings` are the engine's; None when it did not answer any more.
    """

    request: int
    id: RequestId
    finish_reason: str
    code: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    timings: Timings | None


class Telemetry:
    """This one does nothing with what it hears; see `daemon/telemetry.py`. Any thread may call, and no call waits."""

    def refused(self, code: str) -> None:
        """A request was answered with an error before it was accepted."""

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """`seconds` after the request came in."""

    def next_token(self, seconds: float) -> None:
        """`seconds` after the token before it."""

    def finished(self, record: RequestRecord) -> None:
        """Exactly once for every accepted request."""

    def event(self, name: str, **fields: Any) -> None:
        """Something that an operator may want to see; `fields` are numbers, ids and short strings."""

    def metrics(self) -> dict[str, Any]:
        """Every metric by its name; see docs/metrics.md."""
        return {}
