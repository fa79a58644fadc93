"""The application's own description, and what it leaves out of this process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from serve_bench import fake_services

from freetoken.serve.http.app import ROUTES, build_app


@pytest.fixture(scope="module")
def document():
    return build_app(fake_services()).openapi()


def test_the_openapi_document_has_every_path_and_no_other(document) -> None:
    """Oracle: the route table."""
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert described == {(route.method, route.path.replace(":path", "")) for route in ROUTES}


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body], ids=lambda route: route.path)
def test_every_field_is_described_and_no_reference_dangles(document, route) -> None:
    """Oracle: the request model's fields; OpenAPI looks for references elsewhere than pydantic puts them."""
    body = document["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(route.body.model_fields)
    assert "$ref" not in str(body)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body], ids=lambda route: route.path)
def test_no_field_is_both_taken_and_refused(route) -> None:
    """Property: the refused fields are none of the model's."""
    assert not set(route.body.not_implemented) & set(route.body.model_fields)


def test_the_http_process_imports_no_torch() -> None:
    """Oracle: sys.modules of a fresh interpreter."""
    code = "import sys, freetoken.serve.http.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
