"""The null engine and the measurement around it. Oracle: what was asked of it."""

from __future__ import annotations

import pytest
from loop import measure_engine, measure_http
from null_engine import NullStart, null_core

from freetoken.vocab.sampling import SamplingParams


@pytest.mark.parametrize("overlap", [False, True])
def test_the_null_engine_answers_everybody_in_full(overlap: bool) -> None:
    core, _ = null_core(NullStart(streams=3, overlap=overlap))
    wanted = {f"r{n}": 5 + 3 * n for n in range(7)}  # more requests than lanes
    for request_id, tokens in wanted.items():
        core.submit(request_id, list(range(20)), SamplingParams(max_tokens=tokens, ignore_eos=True))
    got = dict.fromkeys(wanted, 0)
    while not core.idle:
        for output in core.step():
            got[output.request_id] += len(output.tokens)
            assert all(97 <= token < 123 for token in output.tokens)
    assert got == wanted
    assert core.cache.stats().pages_used == 0


def test_the_engines_parts_are_within_the_whole() -> None:
    """Property: a step's parts are positive and none is longer than the slowest step."""
    cost = measure_engine(streams=2, tokens=80)
    assert cost.steps == 40
    assert min(cost.plan_ms, cost.launch_ms, cost.send_ms) > 0
    assert cost.step_ms <= cost.p99_ms
    assert cost.cpu_ms > 0


def test_the_whole_chain_is_measured() -> None:
    """Property: every client gets every token (asserted inside), and the figures are of the right sign."""
    cost = measure_http(streams=3, tokens=60, model_ms=2.0)
    assert cost.p99_gap_ms > 0
    assert cost.most_tok_s > 0
    assert cost.streams == 3
