"""The streaming matcher against an obvious reference that sees the whole text."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxkv.stop_strings import StopMatch, StopMatcher


def run(
    pieces: list[str], stops: list[str], *, include: bool = False, min_tokens: int = 0
) -> tuple[str, StopMatch | None]:
    matcher = StopMatcher(stops, include_in_output=include, min_tokens=min_tokens)
    text = "".join([matcher.feed(piece) for piece in pieces]) + matcher.flush()
    return text, matcher.match


def reference(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, StopMatch | None]:
    """Looks through the text after the first `min_tokens` tokens: earliest start, then longest."""
    offset = len("".join(pieces[:min_tokens]))
    text = "".join(pieces)
    for start in range(offset, len(text)):
        for stop in sorted(stops, key=len, reverse=True):
            if text.startswith(stop, start):
                end = start + len(stop)
                ends = itertools.accumulate(len(piece) for piece in pieces)
                num_tokens = next(n for n, total in enumerate(ends, 1) if n > min_tokens and total >= end)
                return text[: end if include else start], StopMatch(stop, num_tokens)
    return text, None


some_pieces = st.lists(st.text("ab", max_size=4), max_size=12)
some_stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
thorough = hypothesis.settings(max_examples=1000, deadline=None)


@thorough
@hypothesis.given(some_pieces, some_stops, st.booleans(), st.integers(0, 4))
def test_streaming_finds_what_the_whole_text_has(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    assert run(pieces, stops, include=include, min_tokens=min_tokens) == reference(pieces, stops, include, min_tokens)


@thorough
@hypothesis.given(some_pieces, some_stops)
def test_only_the_beginning_of_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += matcher.feed(piece)
        if matcher.match is not None:
            return
        held = text.removeprefix(shown)
        assert shown + held == text
        longest = max((text[n:] for n in range(len(text)) if _begins_a_stop(text[n:], stops)), key=len, default="")
        assert held == longest


def _begins_a_stop(text: str, stops: list[str]) -> bool:
    return any(stop != text and stop.startswith(text) for stop in stops)


@thorough
@hypothesis.given(some_pieces, some_stops)
def test_a_match_is_reported_as_soon_as_it_is_certain(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    continuations = {stop[n:] for stop in stops for n in range(len(stop) + 1)}
    for n, piece in enumerate(pieces, 1):
        matcher.feed(piece)
        outcomes = {reference([*pieces[:n], more], stops, False, 0)[1] for more in continuations}
        if matcher.match is None and outcomes and None not in outcomes:
            assert len(outcomes) > 1  # another stop string could still win
        if matcher.match is not None:
            assert outcomes == {matcher.match}
            return


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop", "num_tokens"),
    [
        (["Hello wor", "ld. Bye"], ["world"], "Hello ", "world", 2),
        (["a", "b", "c", "d"], ["bc"], "a", "bc", 3),
        (["abcd"], ["cd", "bc"], "a", "bc", 1),  # earliest
        (["abcd"], ["b", "bcd"], "a", "bcd", 1),  # then longest
        (["ab", "x"], ["b", "bcd"], "a", "b", 1),  # the longer one did not come: the kept output ends a token earlier
        (["ab"], ["b", "bcd"], "a", "b", 1),  # nor before the end
        (["a", "bc", "e"], ["abcd", "bc"], "a", "bc", 2),  # an earlier one that fails does not hide a later one
        (["line", "\n", "\n", "next"], ["\n", "\n\n"], "line", "\n\n", 3),
        (["日本", "語"], ["本語"], "日", "本語", 2),
        (["stop"], ["stop"], "", "stop", 1),
        (["sto"], ["stop"], "sto", None, None),
        (["", "x", "", "y"], ["xy"], "", "xy", 4),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str, stop: str | None, num_tokens: int | None) -> None:
    shown, match = run(pieces, stops)
    assert shown == text
    assert (match and match.stop, match and match.num_tokens) == (stop, num_tokens)


def test_the_stop_string_can_stay() -> None:
    assert run(["ab", "cd"], ["bc"], include=True)[0] == "abc"


def test_text_of_the_first_min_tokens_is_not_searched() -> None:
    pieces = ["END", " EN", "D EN", "D"]
    assert run(pieces, ["END"], min_tokens=0)[1] == StopMatch("END", 1)
    assert run(pieces, ["END"], min_tokens=1)[1] == StopMatch("END", 3)
    assert run(pieces, ["END"], min_tokens=2)[1] == StopMatch("END", 4)  # the one that begins in token 2 is no match
    assert run(pieces, ["END"], min_tokens=4)[1] is None
    assert run(pieces, ["END"], min_tokens=9) == ("".join(pieces), None)


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("end. And more") == "end"
    assert matcher.feed("still") == matcher.flush("more") == ""
    assert matcher.match == StopMatch(".", 1)


def test_the_flushed_tail_belongs_to_the_last_token() -> None:
    matcher = StopMatcher(["x\ufffd"])
    assert matcher.feed("ax") == "a"
    assert matcher.flush("\ufffd") == ""
    assert matcher.match == StopMatch("x\ufffd", 1)


def test_no_stop_strings_let_everything_pass() -> None:
    assert run(["a", "", "b"], []) == ("ab", None)
