"""Malformed bodies by hypothesis: whatever is sent, no 500, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.serve.http.request_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

BODIES = {
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "/v1/completions": (CompletionBody, {"prompt": "hi", "max_tokens": 2}),
    "/tokenize": (TokenizeBody, {"text": "hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1, 2]}),
}
OK = {200, 400, 404}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "content", "role", "fake/model"])
)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3))
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def http(served):
    with served.http() as made:
        yield made
        assert made.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A valid body in which some fields, known or not, hold something else."""
    path = draw(st.sampled_from(sorted(BODIES)))
    model, valid = BODIES[path]
    names = st.sampled_from([*model.model_fields, *model.not_implemented]) | st.text(max_size=6)
    body: dict[str, Any] = {**valid, **draw(st.dictionaries(names, values, max_size=3))}
    if path == "/v1/chat/completions" and draw(st.booleans()):
        keys = st.sampled_from(["role", "content", "name", "tool_calls", "x"])
        body["messages"] = draw(st.lists(st.dictionaries(keys, values, max_size=3), max_size=2))
    body.pop("stream", None) if draw(st.booleans()) else None
    return path, json.dumps(body).encode("utf-8", "replace")


@relaxed
@given(case=damaged())
def test_damaged_fields(http, case: tuple[str, bytes]) -> None:
    """Property: the status is 200, 400 or 404, and an error has the API's shape."""
    path, raw = case
    answer = http.post(path, content=raw)
    assert answer.status_code in OK, (raw, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@relaxed
@given(path=st.sampled_from(sorted(BODIES)), data=st.data())
def test_damaged_bytes(http, path: str, data: st.DataObject) -> None:
    """Property: the same, for a valid body cut off or with bytes overwritten."""
    raw = bytearray(json.dumps(BODIES[path][1]).encode())
    for position in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=3)):
        raw[position] = data.draw(st.integers(0, 255))
    sent = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    assert http.post(path, content=sent).status_code in OK, sent


@settings(relaxed, max_examples=60)
@given(path=st.sampled_from(sorted(BODIES)), raw=st.binary(max_size=60) | values.map(lambda v: json.dumps(v).encode()))
def test_anything_at_all(http, path: str, raw: bytes) -> None:
    """Property: what is no request is 400."""
    assert http.post(path, content=raw).status_code == 400
