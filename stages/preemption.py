"""Swap or compute again: how a request leaves that must make room, and what that choice rests on."""

from __future__ import annotations

import logging
from typing import Any

from deepinfer.stages.messages import CopyMeasured

logger = logging.getLogger(__name__)

MODES = ("swap", "recompute", "auto", "swap-only")


def describe_choice(choice: dict[str, Any]) -> str:
    """What `Preemption.as_dict` said, in words."""
    if "mode" not in choice:
        return "-"
    return f"{choice['mode']}: {choice['chosen'] or 'undecided'} ({choice['reason']})"


class Preemption:
    """Owned by decode. `swap` moves victims to the host and computes them again where the host has no room;
    `swap-only` never computes again; `recompute` never moves; `auto` is decided once, when the first victim leaves: by
    then the copies have been measured, and prompts have been computed. That first one is swapped.
    """

    def __init__(self, mode: str, can_swap: bool, row_bytes: int) -> None:
        self.mode = mode
        self.chosen: str | None = None
        """swap, recompute, or none where neither can be; None before `auto` has decided."""
        self.reason = "asked for"
        self._row_bytes = row_bytes
        self._copy: CopyMeasured | None = None
        self._figures: dict[str, float] = {}
        if mode != "auto":
            self.chosen = "swap" if mode == "swap-only" else mode
        if not can_swap and mode != "recompute":
            self.chosen = "none" if mode == "swap-only" else "recompute"
            self.reason = "there is no host memory to swap to"

    def measured(self, message: CopyMeasured) -> None:
        self._copy = message

    def decide(self, tokens: int, seconds: float, rows: int, stored: int) -> None:
        """A victim leaves. `tokens` and `seconds` are all that prefill has computed since the start, and how long it
        took. `rows` of the pool are what the victim holds for the `stored` tokens of its context: of layers that slide
        those that they still see. Only the first call of `auto` does anything."""
        copy = self._copy
        if self.chosen is not None or copy is None or not tokens or not seconds or not stored:
            return
        if copy.error:
            self._settle("recompute", f"copies could not be measured: {copy.error}")
            return
        out, back = copy.bytes / copy.out_seconds, copy.bytes / copy.in_seconds
        swap = rows * self._row_bytes / stored * (1 / out + 1 / back)
        recompute = seconds / tokens
        self._figures = {
            "copy_out_bytes_per_s": out,
            "copy_in_bytes_per_s": back,
            "prefill_tokens_per_s": tokens / seconds,
            "swap_s_per_token": swap,
            "recompute_s_per_token": recompute,
        }
        words = (
            f"a token takes {1e6 * swap:.3g} us out and in at {out / 1e9:.3g} and {back / 1e9:.3g} GB/s, "
            f"and {1e6 * recompute:.3g} us at {tokens / seconds:.4g} tokens/s of prefill"
        )
        self._settle("swap" if swap <= recompute else "recompute", words)

    def _settle(self, chosen: str, reason: str) -> None:
        self.chosen, self.reason = chosen, reason
        logger.info("preemption: %s chosen: %s", chosen, reason)

    def as_dict(self) -> dict[str, Any]:
        """`chosen` is null and `reason` says so while nothing has been decided."""
        reason = self.reason if self.chosen is not None else "decided when the first request must make room"
        return {"mode": self.mode, "chosen": self.chosen, "reason": reason, **self._figures}
