"""Stop strings: what is sent never depends on how the text was cut, and never contains a part of a stop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.stages.text import StopMatcher


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Grow the text by one character at a time; the first stop that it ends with cuts it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(piece)[0] for piece in pieces)
    return sent + matcher.flush(), matcher.matched


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=6), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
)
def test_what_is_sent_is_the_text_before_the_first_match_for_every_cut(pieces, stops):
    assert run(pieces, stops) == reference("".join(pieces), stops)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abc", max_size=40), stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_text_that_may_begin_a_stop_is_held_and_nothing_more(text, stops):
    matcher = StopMatcher(stops)
    sent = ""
    for end, character in enumerate(text, start=1):
        delta, matched = matcher.push(character)
        sent += delta
        if matched is not None:
            break
        held = text[len(sent) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_is_found_across_pieces_and_its_beginning_never_leaves():
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("42</ans") == ("42", None)
    assert matcher.push("wer> and more") == ("", "</answer>")
    assert matcher.flush() == ""


def test_a_false_beginning_is_sent_once_it_cannot_match_any_more():
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("a </b") == ("a </b", None)
    assert matcher.push(" <") == (" ", None)
    assert matcher.flush() == "<"


def test_the_stop_that_is_complete_first_wins_over_one_that_began_first():
    assert run(["xabcd"], ["abcd", "c"]) == ("xab", "c")


def test_of_stops_that_end_together_the_one_that_began_first_wins():
    assert run(["xabc"], ["c", "bc"]) == ("xa", "bc")


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_text_without_a_match_passes_unchanged(stops):
    assert run(["abc", "", "def"], stops) == ("abcdef", None)


def test_after_a_match_nothing_is_passed_on():
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", ".")
    assert matcher.push("c") == ("", ".")
    assert matcher.flush() == ""
