"""Token ids to text, delta by delta, so that the deltas together are the text of all ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

REPLACEMENT = "�"
"""At the end of a text it may stand for a character that is not complete yet; elsewhere it is final."""
TRIM_ABOVE = 16
"""Every push decodes the window, so it is short; and cutting it takes a decode too, so it is not cut at every push."""
CONTEXT_IDS = 8
"""Kept in front of what comes next; at least 4, because 4 ids can share one character."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def byte_fallback_ids(vocab: Mapping[str, int]) -> frozenset[int]:
    """The ids of `<0x00>` to `<0xFF>` in a vocabulary with byte fallback; empty for others."""
    return frozenset(id for token, id in vocab.items() if _BYTE_TOKEN.fullmatch(token))


class IncrementalDetokenizer:
    """One per stream. `decode` maps ids to text, with or without special tokens. It may drop a leading space
    (as sentencepiece does) but must not clean up others.

    Text is held back while later ids may still change it: an incomplete UTF-8 sequence, and a run of byte
    fallback tokens, which is decoded as a whole or, if any byte of it is wrong, becomes one U+FFFD per byte.
    `byte_ids` are those tokens (`byte_fallback_ids`); a vocabulary that has them must be given with them,
    because nothing in the text of such a token tells that its neighbours decide what becomes of it. Only a
    short window of ids is decoded again for each push.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        byte_ids: Collection[int] = (),
        silent: dict[int, bool] | None = None,
    ) -> None:
        """`silent`: what is known of the vocabulary's ids; streams of one vocabulary share it and add to it."""
        self._decode = decode
        self._byte_ids = frozenset(byte_ids)
        self._window: list[int] = []
        self._closed = 0
        """Ids of the window in front of a byte run that is still open."""
        self._decoded = 0
        """Ids of the window that the last decode has seen."""
        self._emitted = 0
        """Characters of the window's text that have been returned."""
        self._silent = {} if silent is None else silent

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make certain."""
        for id in ids:
            self._append(id)
        if self._closed == self._decoded:
            return ""
        self._decoded = self._closed
        text = self._decode(self._window[: self._closed])
        sure = len(text) - text.endswith(REPLACEMENT)
        delta = text[self._emitted : sure]
        self._emitted = max(self._emitted, sure)
        if self._closed > TRIM_ABOVE:
            self._trim(text)
        return delta

    def flush(self) -> str:
        """The rest, when no more ids will come."""
        text = self._decode(self._window)
        delta = text[self._emitted :]
        self._window, self._closed, self._decoded, self._emitted = [], 0, 0, 0
        return delta

    def _append(self, id: int) -> None:
        self._window.append(id)
        if id in self._byte_ids:
            return
        run_is_open = self._closed < len(self._window) - 1
        if run_is_open and self._is_silent(id):
            return
        self._closed = len(self._window)

    def _is_silent(self, id: int) -> bool:
        """True for an id without text, such as a skipped special token: its two neighbours still touch."""
        if id not in self._silent:
            self._silent[id] = self._decode([id, id]) == ""
        return self._silent[id]

    def _trim(self, text: str) -> None:
        """Drops ids whose text is out. What is not out hangs on the last 4 audible ids at most."""
        audible = (id for id in reversed(self._window[: self._closed]) if not self._is_silent(id))
        kept = list(islice(audible, CONTEXT_IDS))[::-1]
        unreturned = len(text) - self._emitted
        self._emitted = len(self._decode(kept)) - unreturned
        self._window[: self._closed] = kept
        self._closed = self._decoded = len(kept)
