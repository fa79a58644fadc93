"""Requests made from the server's own description, and five hundred bodies that are not what it says.

Oracle: no answer is a server error, every refusal has the API's shape, and afterwards nothing is held.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from freetoken.models import llama
from freetoken.serve.http.app import ROUTES, Route
from freetoken.testing.checkpoints import write_tiny

MODEL = "tiny"
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/tokenize": {"text": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])


@pytest.fixture(scope="module")
def server(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_tiny(llama.FAMILY, tmp_path_factory.mktemp("tiny"))
    started = serve("--model", str(model), "--served-model-name", MODEL, "--threads", "1", "--max-seq-len", "128")
    yield started
    assert started.get("/ready")[0] == 200
    report = started.get("/health")[1]
    assert (report["restarts"], report["kv_pages_used"]) == (0, 0)
    assert "Traceback" not in started.text()


@pytest.fixture(scope="module")
def http(server: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def described(server: Any) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def described_path(route: Route) -> str:
    """OpenAPI knows no converters."""
    return route.path.replace(":path}", "}")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_requests_made_from_the_description(described: Any, route: Route) -> None:
    """Those that the description allows, and those that break it in one place each."""
    operation = described[described_path(route)][route.method]
    modes = GenerationMode if route.body is not None else [GenerationMode.POSITIVE]

    for mode in modes:

        @settings(relaxed, max_examples=40)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.call_and_validate(checks=[not_a_server_error], timeout=60)

        ask()


def test_every_route_is_described(described: Any) -> None:
    paths = described.raw_schema["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert found == {(route.method, described_path(route)) for route in ROUTES}


numbers = st.integers(-(2**65), 2**65) | st.integers(-2, 300) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=6)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3))


def assert_refused_or_answered(answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@settings(relaxed, max_examples=300)
@given(data=st.data())
def test_fields_that_hold_something_else(http: httpx.Client, described: Any, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(VALID)))
    content = described.raw_schema["paths"][path]["post"]["requestBody"]["content"]
    names = st.sampled_from(sorted(content["application/json"]["schema"]["properties"])) | st.text(max_size=6)
    body = {**VALID[path], **data.draw(st.dictionaries(names, values, min_size=1, max_size=3))}
    assert_refused_or_answered(http.post(path, content=json.dumps(body).encode("utf-8", "replace")))


@settings(relaxed, max_examples=200)
@given(path=st.sampled_from(sorted(VALID)), data=st.data())
def test_bodies_cut_off_or_overwritten(http: httpx.Client, path: str, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(VALID[path]).encode())
    for position in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=3)):
        raw[position] = data.draw(st.integers(0, 255))
    assert_refused_or_answered(http.post(path, content=bytes(raw[: data.draw(st.integers(0, len(raw)))])))
