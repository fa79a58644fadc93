"""Certificates. Oracle: the rule of thumb worked out by hand, first − m ≤ max(15 % of m, 5 ms)."""

from __future__ import annotations

import json

import pytest

from freetoken.warmup.certificate import Certificate, Evidence, Measured, Touch, judge, to_json
from freetoken.warmup.probes import Probe, ServerLimits

LIMITS = ServerLimits(1000, 100, 8, 16, 1000, 5000)
PROBE = Probe("length 17", 17, 0, 1, "greedy")
QUIET = {"late_compiles": 2.0, "late_loads": 5.0, "stall_ms": 0.0}


LOADING = "Runtime Triggered Module Loading"
NOTHING_LOADED = Evidence(24, {LOADING: 0, "Lazy Function Loading": 0}, seen=9000)


def measured(first: float, *again: float, stall: float = 0.0) -> Measured:
    return Measured(PROBE, (Touch(first, stall), *(Touch(ms) for ms in again)))


def certificate(items: list[Measured], after: dict[str, float] | None = None) -> Certificate:
    return judge(
        model="m", fingerprint="f", written="2026-01-01T00:00:00Z", seed=0, measured=items, before=QUIET,
        after={**QUIET, **(after or {})}, limits=LIMITS, seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "again", "slow"),
    [
        (15.0, (10.0, 9.0, 8.0), False),  # 5 ms is allowed whatever the length
        (15.1, (10.0, 9.0, 8.0), True),
        (115.0, (90.0, 100.0, 80.0), False),  # 15 % of the slowest of the next three
        (115.1, (90.0, 100.0, 80.0), True),
        (5.0, (90.0, 100.0, 80.0), False),
    ],
)
def test_a_first_touch_is_compared_with_the_slowest_of_the_next_three(
    first: float, again: tuple[float, ...], slow: bool
) -> None:
    assert measured(first, *again).slow is slow


def test_counted_transfer_stall_is_subtracted() -> None:
    assert not measured(130.0, 100.0, 100.0, 100.0, stall=20.0).slow
    assert measured(130.0, 100.0, 100.0, 100.0, stall=10.0).slow


def test_two_hundred_quiet_probes_certify() -> None:
    found = certificate([measured(10, 10, 10, 10)] * 200)
    assert found.passes
    assert (found.probes, found.up_to_tokens) == (200, 17)
    assert "certified for prompts up to 17 tokens: 200 probes" in str(found)
    assert json.loads(json.dumps(to_json(found)))["passes"] is True


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"late_compiles": 3.0}, "1 late compiles"),
        ({"late_loads": 9.0}, "4 late loads"),
    ],
)
def test_one_late_event_fails_it(after: dict[str, float], said: str) -> None:
    found = certificate([measured(10, 10, 10, 10)] * 200, after)
    assert not found.passes
    assert said in str(found)


def test_memory_that_grew_fails_it_where_it_is_told() -> None:
    used = {"device_used_bytes": 100.0}

    def found(after: float) -> Certificate:
        return judge(
            model="m", fingerprint="f", written="", seed=0, measured=[measured(1, 1, 1, 1)] * 200, limits=LIMITS,
            seconds=1.0, before={**QUIET, **used}, after={**QUIET, "device_used_bytes": after}, evidence=NOTHING_LOADED,
        )  # fmt: skip

    assert found(100.0).passes
    assert "device used bytes grew by 1" in str(found(101.0))


def test_one_slow_first_touch_fails_it_and_is_named() -> None:
    found = certificate([measured(10, 10, 10, 10)] * 199 + [measured(400, 10, 10, 10)])
    assert not found.passes
    assert found.worst_excess_ms == 390
    assert "length 17: 17 new tokens after 0, batch 1, greedy: 400.0 ms, then at most 10.0" in str(found)


def test_few_probes_prove_little() -> None:
    assert certificate([measured(10, 10, 10, 10)] * 199).failures == ("only 199 probes; a certificate needs 200",)
    assert not certificate([]).passes


@pytest.mark.parametrize(
    ("evidence", "failures"),
    [
        (NOTHING_LOADED, ()),
        (Evidence(24, {LOADING: 2}, seen=9000), (f"2 × {LOADING} in the profiler's record of 24 probes",)),
        (Evidence(24, {LOADING: 0}), ("no profiler evidence: the profiler recorded nothing at all",)),
        (Evidence(because="CUPTI is busy"), ("no profiler evidence: CUPTI is busy",)),
        (None, ("no profiler evidence: none was asked for",)),
    ],
)
def test_a_device_demands_the_profilers_word(evidence: Evidence | None, failures: tuple[str, ...]) -> None:
    """By hand, after design 5.6: both events zero, recorded by a profiler that demonstrably recorded something."""
    gauges = {**QUIET, "device_used_bytes": 5.0}
    found = judge(
        model="m", fingerprint="f", written="", seed=0, measured=[measured(1, 1, 1, 1)] * 200, limits=LIMITS,
        seconds=1.0, before=gauges, after=gauges, evidence=evidence,
    )  # fmt: skip
    assert found.failures == failures
    assert json.loads(json.dumps(to_json(found)))["failures"] == list(failures)
    assert ("profiled 24 probes, 9000 records" in str(found)) == (evidence is not None and evidence.seen > 0)


def test_a_run_that_was_stopped_is_no_certificate_whatever_it_found() -> None:
    found = judge(
        model="m", fingerprint="f", written="", seed=0, measured=[measured(1, 1, 1, 1)] * 200, limits=LIMITS,
        seconds=1.0, before=QUIET, after=QUIET, stopped="stopped after 200 of 300 probes: SIGTERM came",
    )  # fmt: skip
    assert not found.passes
    assert found.failures[0] == "stopped after 200 of 300 probes: SIGTERM came"
    assert "not certified" in str(found)
