"""The budget of prompt tokens. Oracles: its own inequalities, and a machine whose steps cost what a formula says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedule_device import Answers, make_core, run, simulated

from freetoken.run.step_plan import StepPlan
from freetoken.schedule.prefill_budget import StepSpeed, step_budget
from freetoken.vocab.sampling import SamplingParams

PAGE = 16
FAR = 1e9  # a context so long that growth plays no part


def measured(ms_per_token: float, decode_ms: float, context: float = FAR) -> StepSpeed:
    speed = StepSpeed()
    speed.observe(0, 1, decode_ms, 0)
    speed.observe(100, 0, 100 * ms_per_token, context)
    return speed


def budget(most: int, decodes: int, speed: StepSpeed, gap_ms: float, prefix: int = 0) -> int:
    return step_budget(most, decodes, speed, gap_ms, PAGE).allowed(prefix)


def test_without_running_requests_it_is_all_that_fits() -> None:
    assert budget(512, 0, StepSpeed(), 1.0) == 512
    assert budget(512, 0, measured(1e6, 1e6), 1.0) == 512


def test_before_anything_was_measured_it_is_a_page() -> None:
    assert budget(512, 3, StepSpeed(), 500.0) == PAGE
    only_prompts = StepSpeed()
    only_prompts.observe(100, 0, 50.0, FAR)
    assert budget(512, 3, only_prompts, 500.0) == PAGE


def test_it_is_what_the_speed_allows() -> None:
    """(0.8 · 500 − 40) ms at 2 ms a token; three decodes may take three times as long as the one that was measured."""
    assert budget(512, 1, measured(2.0, 40.0), 500.0) == 180
    assert budget(512, 3, measured(2.0, 40.0), 500.0) == 140
    assert budget(512, 3, measured(0.01, 40.0), 500.0) == 509
    assert budget(512, 3, measured(1000.0, 40.0), 500.0) == PAGE
    assert budget(512, 3, measured(2.0, 4000.0), 500.0) == PAGE


def test_longer_contexts_may_cost_in_proportion() -> None:
    """2 ms a token at a context of 100: after 200 tokens 60 more end at 260, so 60 · 2 · 2.6 ms of the 360."""
    speed = measured(2.0, 40.0, context=100)
    assert budget(512, 1, speed, 500.0, prefix=200) == 67
    assert speed.chunk_ms(67, 200) <= 360 < speed.chunk_ms(68, 200)


def test_chunks_share_the_step() -> None:
    """A second chunk gets what the first left, and no page of its own."""
    left = step_budget(512, 1, measured(2.0, 40.0), 500.0, PAGE)
    left.take(100, 0)
    assert left.allowed(0) == 80
    left.take(80, 0)
    assert not left.open


@given(
    st.integers(1, 600), st.integers(1, 700), st.floats(1e-3, 1e4), st.floats(1e-3, 1e4), st.floats(1, 1e4),
    st.integers(1, 5000), st.integers(0, 5000),
)  # fmt: skip
def test_it_never_leaves_the_step_nor_the_gap(
    most: int, rows: int, token_ms: float, decode_ms: float, gap_ms: float, context: int, prefix: int
) -> None:
    """Property: a page at least where there is room; beyond it the predicted time is within the gap."""
    speed = measured(token_ms, decode_ms, context)
    tokens = budget(most, rows, speed, gap_ms, prefix)
    room = max(most - rows, 0)
    assert min(room, PAGE) <= tokens <= room
    if tokens > PAGE:
        assert speed.decodes_ms(rows) + speed.chunk_ms(tokens, prefix) <= gap_ms


def test_the_short_end_of_a_prompt_does_not_shrink_the_next_one_for_long() -> None:
    """Five tokens take as long as the step's fixed cost: two steps later the budget is the old one."""
    speed = measured(0.01, 4.0)
    for tokens in (4000, 4000, 5):
        speed.observe(tokens, 1, 4.0 + 8.0 + 0.01 * tokens, 12_000)
    budgets = []
    for _ in range(3):
        budgets.append(budget(4096, 1, speed, 500.0))
        speed.observe(budgets[-1], 1, 4.0 + 8.0 + 0.01 * budgets[-1], budgets[-1])
    assert budgets[2] == 4095, budgets


costs = st.fixed_dictionaries(
    {
        "fixed_ms": st.floats(0, 30),
        "decode_ms": st.floats(0.1, 10),  # each running request
        "token_ms": st.floats(0.01, 3),
        "attention_ms": st.floats(0, 0.002),  # each token of a prompt and each token it attends to
    }
)
talks = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 400), st.integers(2, 40)), min_size=2, max_size=6)


class TestGap:
    """On a clock that only steps move. Where a page beside the decodes fits the gap, no gap is longer than allowed."""

    @pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
    @settings(max_examples=80, deadline=None)
    # A prompt of one token is no decode: beside 255 others it says nothing about what a decode costs.
    @example(
        costs={"fixed_ms": 5.0, "decode_ms": 1.0, "token_ms": 1.0, "attention_ms": 0.0},
        talks=[(0, 260, 2), (0, 1, 2), (0, 263, 2)], page=4, hybrid=False,
    )  # fmt: skip
    @given(costs=costs, talks=talks, page=st.sampled_from([4, 16]), hybrid=st.booleans())
    def test_a_long_prefill_never_widens_it(
        self, overlap: bool, costs: dict[str, float], talks: list[tuple[int, int, int]], page: int, hybrid: bool
    ) -> None:
        context, running = 600, 6

        def cost_ms(prompt_tokens: int, decodes: int, attended: int) -> float:
            return (
                costs["fixed_ms"]
                + costs["decode_ms"] * decodes
                + costs["token_ms"] * prompt_tokens
                + costs["attention_ms"] * attended
            )

        def cost_s(plan: StepPlan) -> float:
            decodes = sum(row.decodes for row in plan.rows)
            attended = sum(len(row.tokens) * row.context_tokens for row in plan.rows)
            return cost_ms(plan.num_tokens - decodes, decodes, attended) / 1000

        # The least a step beside running requests can cost: a page, everything at its worst.
        gap_ms = 1.25 * cost_ms(page, running, (page + running) * context)
        core = make_core(
            pages=4000 // page, page_tokens=page, max_running=running, max_step_tokens=256, max_context=context,
            max_gap_ms=gap_ms, overlap=overlap, hybrid=hybrid, cost_s=cost_s,
        )  # fmt: skip
        answers = Answers()
        for number, (after, prompt, wanted) in enumerate(talks):
            for _ in range(after):
                answers.take(core.step(), simulated(core).clock.now)
            params = SamplingParams(max_tokens=wanted, ignore_eos=True)
            core.submit(f"r{number}", [(number + i) % 9 for i in range(prompt)], params)
        run(core, answers)
        for times in answers.times.values():
            gaps = [(b - a) * 1000 for a, b in pairwise(times)]
            assert max(gaps, default=0.0) <= gap_ms
