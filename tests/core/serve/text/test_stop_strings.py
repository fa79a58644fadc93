"""Stop strings against a plain search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.serve.text import StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Grow the text by one character until it ends in a stop string; the longest of those that fit there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abc", max_size=40), stops=STOPS, cuts=st.lists(st.integers(0, 6), max_size=30), include=st.booleans()
)
def test_any_cutting_gives_what_a_plain_search_gives(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    watch = StopStrings(stops, include_stop=include)
    emitted, stopped, at = "", None, 0
    for size in [*cuts, len(text)]:
        emit, stopped = watch.push(text[at : at + size])
        emitted += emit
        at += size
        if stopped is not None:
            break
    emitted += watch.flush()
    assert (emitted, stopped) == naive(text, stops, include)
    assert watch.matched == stopped


@settings(max_examples=300, deadline=None)
@given(text=st.text("abc", max_size=20), stops=STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop(text: str, stops: list[str]) -> None:
    """Property: what is held back is exactly the longest end of the text that begins a stop string."""
    watch = StopStrings(stops)
    emit, stopped = watch.push(text)
    if stopped is None:
        held = text[len(emit) :]
        begins = [n for n in range(1, len(text) + 1) if any(stop.startswith(text[-n:]) for stop in stops)]
        assert len(held) == max(begins, default=0)


def test_nothing_comes_after_a_stop() -> None:
    """Second look at the contract: pushes after the stop emit nothing and repeat the verdict."""
    watch = StopStrings(["END"])
    assert watch.push("textEN") == ("text", None)
    assert watch.push("D more") == ("", "END")
    assert watch.push("still more") == ("", "END")
    assert watch.flush() == ""


def test_without_stops_text_passes_through() -> None:
    assert StopStrings(()).push("abc") == ("abc", None)


def test_an_empty_stop_is_our_own_bug() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
