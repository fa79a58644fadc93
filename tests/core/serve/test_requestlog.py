"""Request ids and the log line, read back as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.serve.requestlog import RequestRecord, request_id_from


@pytest.mark.parametrize("sane", ["a", "req-1.2:3_4", "x" * 128])
def test_a_sane_id_is_kept(sane: str) -> None:
    """Oracle: the id sent."""
    assert request_id_from(sane) == sane


@given(st.none() | st.text().filter(lambda t: not (t.isascii() and t.replace("-", "a").isalnum())) | st.just("x" * 129))
def test_any_other_id_is_replaced_by_a_sane_one(header: str | None) -> None:
    """Property: what comes out passes its own check, whatever came in."""
    made = request_id_from(header)
    assert request_id_from(made) == made


@given(st.text(), st.text())
def test_the_line_is_one_line_of_json(path: str, error: str) -> None:
    """Round trip: json.loads gives the fields back, and text from clients cannot break the line."""
    record = RequestRecord("id-1", path, error=error, prompt_tokens=3, first_token=None)
    record.ended = record.started + 0.25
    line = record.line()
    assert "\n" not in line
    read = json.loads(line)
    assert (read["path"], read["prompt_tokens"], read["ttft_ms"]) == (path, 3, None)
    assert read["total_ms"] == pytest.approx(250, abs=0.2)


def test_the_engine_knows_equal_client_ids_apart() -> None:
    """Oracle: two records of one id give no equal engine ids."""
    first, second = RequestRecord("same", "/"), RequestRecord("same", "/")
    ids = {record.engine_id(index) for record in (first, second) for index in (0, 1)}
    assert len(ids) == 4
