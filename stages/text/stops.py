"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, but no part of a stop string: what may begin one is held back.

    The first match is the one that is complete first; of several that are complete at once, the one that
    began first. That does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are non-empty strings (`stages.protocol` sees to it); none at all is fine."""
        self._stops = tuple(stops)
        self._prefixes = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._longest = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be sent, the stop that has matched). After a match nothing is passed on."""
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)], self.matched
        split = len(text) - self._tail(text)
        self._held = text[split:]
        return text[:split], None

    def flush(self) -> str:
        """What was held back, when the text has ended without a match."""
        rest, self._held = self._held, ""
        return rest

    def _tail(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0
