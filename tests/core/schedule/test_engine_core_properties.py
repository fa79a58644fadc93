"""Crowds of requests that share prefixes, in every size of everything. Oracle: each request alone, on paper."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_device import Answers, make_core, plain_answer, simulated

from freetoken.kv.audit import audit
from freetoken.vocab.sampling import SamplingParams

STEM = tuple((i * i + 3 * i) % 7 for i in range(48))

requests = st.tuples(
    st.integers(0, 8),  # steps before it comes
    st.integers(0, len(STEM)),  # tokens of the stem that it shares
    st.integers(0, 2),  # its own first token
    st.integers(1, 9),  # and how many of its own
    st.integers(1, 24),  # tokens wanted
)
sizes = st.fixed_dictionaries(
    {
        "page_tokens": st.integers(1, 4),
        "pages": st.integers(20, 40),
        "max_running": st.integers(1, 5),
        "max_step_tokens": st.integers(1, 24),
        "max_gap_ms": st.sampled_from([2.0, 1000.0]),
        "prefix_cache": st.sampled_from([True, True, True, False]),
    }
)
crowds = st.lists(requests, min_size=2, max_size=12)


def run_crowd(core: Any, crowd: list[tuple[int, int, int, int, int]]) -> None:
    answers, expected = Answers(), {}
    engine = simulated(core)
    longest = core.limits.max_context_tokens
    waiting = sorted(enumerate(crowd), key=lambda item: item[1][0])
    steps = 0
    while waiting or not core.idle:
        while waiting and (waiting[0][1][0] <= steps or core.idle):
            number, (_, shared, first, own, wanted) = waiting.pop(0)
            prompt = [*STEM[:shared], *((first + i) % 9 for i in range(own))][: longest - 1]
            params = SamplingParams(max_tokens=wanted, ignore_eos=True)
            core.submit(f"r{number}", prompt, params)
            expected[f"r{number}"] = plain_answer(prompt, params, longest)
        answers.take(core.step(), engine.clock.now)
        audit(core.cache)
        assert not engine.faults
        steps += 1
        assert steps < 20_000, "it does not end"
    assert {name: (answers.tokens[name], answers.finish[name]) for name in expected} == expected
    assert core.cache.stats().pages_used == 0
    assert not engine.known


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
class TestCrowds:
    @settings(max_examples=80, deadline=None)
    @given(sizes=sizes, crowd=crowds, window=st.sampled_from([0, 0, 2, 5]))
    def test_plain(self, overlap: bool, sizes: dict[str, Any], crowd: list[Any], window: int) -> None:
        step = max(sizes["max_step_tokens"], sizes["max_running"])
        run_crowd(make_core(overlap=overlap, window=window * step, **sizes), crowd)

    @settings(max_examples=150, deadline=None)
    @given(sizes=sizes, crowd=crowds, snapshots=st.integers(0, 4), window=st.sampled_from([0, 0, 2, 5]))
    def test_hybrid(self, overlap: bool, sizes: dict[str, Any], crowd: list[Any], snapshots: int, window: int) -> None:
        step = max(sizes["max_step_tokens"], sizes["max_running"])
        core = make_core(overlap=overlap, hybrid=True, snapshots=snapshots, window=window * step, **sizes)
        run_crowd(core, crowd)
