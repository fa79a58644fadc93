"""Messages survive the pipe. Oracle: the value that went in."""

from __future__ import annotations

import pickle
from multiprocessing import Pipe

import attrs
from hypothesis import given
from hypothesis import strategies as st

from freetoken.serve.messages import Delta, Deltas, TokenLogprob

LOGPROBS = st.builds(
    TokenLogprob,
    st.integers(0, 10**6),
    st.floats(-50, 0),
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(-50, 0)), max_size=3).map(tuple),
)
DELTAS = st.builds(
    Delta,
    st.text(max_size=12),
    st.lists(st.integers(0, 10**6), max_size=4).map(tuple),
    st.sampled_from(("", "stop", "length")),
    st.lists(LOGPROBS, max_size=2).map(tuple),
    st.integers(0, 10**5),
)


@given(st.lists(DELTAS, max_size=5).map(tuple).map(Deltas))
def test_deltas_are_the_same_on_the_other_side(message: Deltas) -> None:
    """Round trip."""
    assert pickle.loads(pickle.dumps(message)) == message


def test_every_field_of_a_delta_crosses() -> None:
    """A delta whose fields all differ from their defaults, so that one left out of the tuples would show."""
    delta = Delta("r", (1, 2), "stop", (TokenLogprob(1, -0.5, ((1, -0.5),)),), 7)
    for field in attrs.fields(Delta):
        assert field.default is attrs.NOTHING or getattr(delta, field.name) != field.default, field.name
    ours, theirs = Pipe()
    ours.send(Deltas((delta,)))
    assert theirs.recv() == Deltas((delta,))
