"""Admission: a pure decision, against its own definition of room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetoken.serve.limits import Load, ServerLimits, admit

counts = st.integers(1, 500)


@given(st.integers(0, 1000), counts, counts, st.integers(0, 500))
def test_taken_exactly_while_running_plus_queue_has_room(in_flight: int, more: int, running: int, queue: int) -> None:
    """Property: room is what runs at once plus the queue, and nothing else decides."""
    decision = admit(ServerLimits(max_queue=queue), Load(in_flight), more, running)
    assert decision.taken == (in_flight + more <= running + queue)
    assert decision.taken == (decision.reason == "")


@given(st.floats(0, 1e5), st.integers(0, 500), counts)
def test_a_refusal_says_when_to_come_back_within_a_minute(recent_s: float, over: int, running: int) -> None:
    """Property: Retry-After is a whole number of seconds from 1 to 60, and longer answers never shorten it."""
    limits = ServerLimits(max_queue=4)
    full = running + 4 + over
    wait = admit(limits, Load(full, recent_s), 1, running).retry_after_s
    assert 1 <= wait <= 60
    assert admit(limits, Load(full, recent_s * 2), 1, running).retry_after_s >= wait
