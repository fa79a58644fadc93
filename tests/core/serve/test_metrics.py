"""The metrics: against ``docs/metrics.md``, against prometheus_client's own histogram, and as its parser reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.parser import text_string_to_metric_families

from freetoken.serve.messages import EngineStats
from freetoken.serve.metrics import GAP_S, OUTCOMES, EngineView, Histogram, ServerMetrics
from freetoken.serve.requestlog import RequestRecord

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def metrics_with(stats: EngineStats = EngineStats(), serving: bool = True, restarts: int = 0) -> ServerMetrics:
    return ServerMetrics(lambda: EngineView(stats, serving, restarts))


def samples(metrics: ServerMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {s.name + "".join(f"/{v}" for v in s.labels.values()): s.value for f in families for s in f.samples}


def test_every_name_and_type_is_documented_and_every_documented_one_exists() -> None:
    """Oracle: docs/metrics.md."""
    documented = dict(re.findall(r"^\| `(freetoken_\w+)` \| (\w+) \|", DOCS.read_text(), re.MULTILINE))
    exposed = {family.name: family.type for family in text_string_to_metric_families(metrics_with().text().decode())}
    assert documented == exposed


def test_every_outcome_is_documented_and_present_before_it_happens() -> None:
    """Oracle: docs/metrics.md, and the rule that a counter starts at zero, not at its first event."""
    row = next(line for line in DOCS.read_text().splitlines() if "`freetoken_requests`" in line)
    assert all(f"`{outcome}`" in row for outcome in OUTCOMES)
    exposed = samples(metrics_with())
    assert [exposed[f"freetoken_requests_total/{outcome}"] for outcome in OUTCOMES] == [0] * len(OUTCOMES)


@given(st.lists(st.floats(0, 10, allow_nan=False)))
def test_histogram_buckets_as_prometheus_client_counts_them(values: list[float]) -> None:
    """Oracle: prometheus_client.Histogram with the same bounds."""
    registry = CollectorRegistry()
    theirs, ours = TheirHistogram("h", "h", buckets=GAP_S, registry=registry), Histogram(GAP_S)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    expected = {s.labels.get("le"): s.value for s in next(iter(registry.collect())).samples if s.name != "h_created"}
    found = {s.labels.get("le"): s.value for s in ours.family("h", "h").samples}
    assert found == pytest.approx(expected)


def test_the_engines_gauges_and_counters_pass_through() -> None:
    """Oracle: the values put in."""
    stats = EngineStats(
        running=3, kv_pages_used=7, kv_pages_total=9, prefix_hit_tokens=11, counters=(("moe_hits", 5.0),)
    )
    found = samples(metrics_with(stats, serving=False, restarts=2))
    assert found["freetoken_requests_running"] == 3
    assert found["freetoken_kv_pages_used"] == 7
    assert found["freetoken_kv_pages_capacity"] == 9
    assert found["freetoken_prefix_hit_tokens_total"] == 11
    assert found["freetoken_engine_events_total/moe_hits"] == 5
    assert found["freetoken_engine_up"] == 0
    assert found["freetoken_engine_restarts_total"] == 2


def test_a_finished_request_is_counted_once_with_its_tokens() -> None:
    """Oracle: the record put in."""
    metrics = metrics_with()
    record = RequestRecord("r", "/v1/completions", prompt_tokens=5, completion_tokens=8, finish="stop")
    record.ended = record.started + 1.5
    metrics.count(record)
    found = samples(metrics)
    assert found["freetoken_requests_total/stop"] == 1
    assert (found["freetoken_prompt_tokens_total"], found["freetoken_completion_tokens_total"]) == (5, 8)
    assert found["freetoken_request_duration_seconds_sum"] == pytest.approx(1.5)


def test_two_servers_in_one_process_share_no_registry() -> None:
    """Oracle: prometheus_client raises on a name registered twice in one registry."""
    assert metrics_with().registry is not metrics_with().registry
