"""Who runs when, and how requests end. Oracle: what each rule says, on a simulated device."""

from __future__ import annotations

from typing import Any

import pytest
from schedule_device import EOS, VOCAB, Answers, make_core, plain_answer, run, simulated

from freetoken.run.step_plan import StepPlan
from freetoken.schedule.engine_core import EngineCore
from freetoken.vocab.errors import UsageError
from freetoken.vocab.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i * i) % 9 for i in range(length)]


def wants(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


def shape(plan: StepPlan) -> list[tuple[str, int]]:
    return [(row.request_id, len(row.tokens)) for row in plan.rows]


def shapes(core: EngineCore) -> list[list[tuple[str, int]]]:
    return [shape(plan) for plan in simulated(core).plans]


def steps(core: EngineCore, count: int, answers: Answers | None = None) -> None:
    for _ in range(count):
        outputs = core.step()
        if answers is not None:
            answers.take(outputs, 0.0)


# ------------------------------------------------------------------------------------------- order within a step


def test_decodes_come_first_then_chunks_then_new_requests() -> None:
    core = make_core(max_step_tokens=16)
    core.submit("a", prompt(3), wants(20))
    steps(core, 3)
    core.submit("b", prompt(40, 2), GREEDY)
    core.submit("c", prompt(5, 3), GREEDY)
    steps(core, 4)
    assert shapes(core)[3:] == [
        [("a", 1), ("b", 15)],
        [("a", 1), ("b", 15)],
        [("a", 1), ("b", 10), ("c", 5)],
        [("a", 1), ("b", 1), ("c", 1)],
    ]


def test_requests_are_admitted_in_the_order_they_came_up_to_the_limit() -> None:
    core = make_core(max_running=2)
    for name in "abcd":
        core.submit(name, prompt(4, ord(name)), wants(3))
    seen: list[str] = []
    while not core.idle:
        core.step()
        seen += [r.request_id for r in core.scheduler.running if r.request_id not in seen]
        assert len(core.scheduler.running) <= 2
    assert seen == list("abcd")


def test_a_head_without_room_lets_nobody_overtake() -> None:
    """b needs 9 of 10 pages while a holds 3; c would fit, and waits all the same."""
    core = make_core(pages=10, page_tokens=4, max_context=40)
    core.submit("a", prompt(8), wants(4))
    core.submit("b", prompt(33, 2), wants(2))
    core.submit("c", prompt(2, 3), wants(2))
    steps(core, 3)
    assert [r.request_id for r in core.scheduler.running] == ["a"]
    assert [r.request_id for r in core.scheduler.waiting] == ["b", "c"]
    assert set(run(core).finish) == {"a", "b", "c"}


def test_lanes_are_given_back_and_used_again() -> None:
    core = make_core(max_running=2)
    for i in range(6):
        core.submit(f"r{i}", prompt(4, i), wants(1 + i % 3))
    run(core)
    lanes = {row.lane for plan in simulated(core).plans for row in plan.rows}
    assert lanes == {0, 1}
    assert sorted(core.scheduler._lanes) == [0, 1]


# ------------------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize("overlap", [False, True])
def test_the_youngest_is_preempted_and_comes_back_with_all_it_had(overlap: bool) -> None:
    """Both fit when they come and not when they have grown; the sampler is told of each of them once."""
    core = make_core(pages=8, page_tokens=2, max_context=14, overlap=overlap)
    params = wants(9)
    core.submit("old", prompt(4, 1), params)
    core.submit("young", prompt(4, 5), params)
    preempted = []
    answers = Answers()
    while not core.idle:
        answers.take(core.step(), 0.0)
        preempted += [r.request_id for r in core.scheduler.waiting if r.num_generated > 0]
    assert set(preempted) == {"young"}
    assert core.scheduler.preemptions >= 1
    assert answers.tokens["old"] == plain_answer(prompt(4, 1), params, 14)[0]
    assert answers.tokens["young"] == plain_answer(prompt(4, 5), params, 14)[0]
    assert not simulated(core).faults
    assert core.cache.stats().pages_used == 0


def test_cached_tokens_are_those_of_the_first_run_not_of_the_resumed_one() -> None:
    core = make_core(pages=8, page_tokens=2, max_context=14)
    core.submit("old", prompt(4, 1), wants(9))
    core.submit("young", prompt(4, 5), wants(9))
    cached: dict[str, set[int]] = {}
    while not core.idle:
        for output in core.step():
            cached.setdefault(output.request_id, set()).add(output.cached_tokens)
    assert core.scheduler.preemptions >= 1
    assert cached == {"old": {0}, "young": {0}}


# ------------------------------------------------------------------------------------------- overlap


def test_steps_overlap_without_a_gap_between_them() -> None:
    """Every decode but the first is fed from the device, and every step of the cycle launches one."""
    core = make_core(overlap=True)
    core.submit("a", prompt(4), wants(10))
    cycles = 0
    while not core.idle:
        core.step()
        cycles += 1
    plans = simulated(core).plans
    assert len(plans) == 10
    assert cycles == 11, "one more to read the last"
    assert [row.pending for plan in plans for row in plan.rows] == [False] + [True] * 9


def test_no_step_is_launched_for_a_request_that_ends_by_length() -> None:
    core = make_core(overlap=True)
    core.submit("a", prompt(4), wants(1))
    run(core)
    assert len(simulated(core).plans) == 1


def test_what_a_step_in_flight_computes_for_a_stopped_request_is_dropped() -> None:
    core = make_core(overlap=True)
    params = SamplingParams(max_tokens=50)
    first = next(i for i in range(9) if plain_answer(prompt(5, i), params, 200)[1] == "stop")
    core.submit("a", prompt(5, first), params)
    answers = run(core)
    assert (answers.tokens["a"], answers.finish["a"]) == plain_answer(prompt(5, first), params, 200)
    assert len(simulated(core).plans) == len(answers.tokens["a"]) + 1


# ------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "in flight", "preempted"])
def test_an_aborted_request_frees_everything_in_every_state(state: str) -> None:
    core = make_core(
        pages=8, page_tokens=2, max_context=14, max_running=2, max_step_tokens=3, overlap=state != "waiting"
    )
    if state == "waiting":
        core.submit("other", prompt(3), wants(3))
        core.submit("third", prompt(3), wants(3))
    if state == "preempted":
        core.submit("old", prompt(4, 1), wants(9))
    core.submit("x", prompt(9 if state == "prefilling" else 4, 5), wants(9))
    victim = core.scheduler._by_id["x"]
    while state == "preempted" and core.scheduler.preemptions == 0:
        core.step()
    steps(core, {"waiting": 1, "prefilling": 1, "decoding": 6, "in flight": 5, "preempted": 0}[state])
    reached = {
        "waiting": victim.lane < 0 and victim.num_generated == 0,
        "prefilling": victim.lane >= 0 and victim.prefilling,
        "decoding": victim.lane >= 0 and victim.num_generated > 0,
        "in flight": victim.unread > 0,
        "preempted": victim.lane < 0 and victim.num_generated > 0,
    }
    assert reached[state]
    core.abort("x")
    answers = run(core)
    assert "x" not in answers.tokens
    assert core.cache.stats().pages_used == 0
    assert "x" not in simulated(core).known
    assert not simulated(core).faults


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    core = make_core(max_running=1)
    clock = simulated(core).clock
    core.submit("running", prompt(4), wants(100), deadline=clock.now + 0.010)
    core.submit("waiting", prompt(4), wants(100), deadline=clock.now + 0.005)
    core.submit("patient", prompt(4), wants(3))
    answers = run(core)
    assert answers.finish == {"waiting": "deadline", "running": "deadline", "patient": "length"}
    assert answers.tokens["waiting"] == []
    expected = plain_answer(prompt(4), wants(100), 200)[0]
    assert 0 < len(answers.tokens["running"]) < 100
    assert answers.tokens["running"] == expected[: len(answers.tokens["running"])]
    assert core.cache.stats().pages_used == 0


def test_a_failed_step_fails_its_own_requests_alone() -> None:
    core = make_core(max_running=2)
    for name in "abc":
        core.submit(name, prompt(4, ord(name)), wants(5))
    answers = Answers()
    steps(core, 2, answers)
    simulated(core).fail_launch = True
    outputs = core.step()
    assert sorted((o.request_id, o.finish) for o in outputs) == [("a", "error"), ("b", "error")]
    assert all(o.error is not None and "RuntimeError: a kernel was refused" in o.error.found for o in outputs)
    answers.take(outputs, 0.0)
    run(core, answers)
    assert answers.finish == {"a": "error", "b": "error", "c": "length"}
    assert answers.tokens["c"] == plain_answer(prompt(4, ord("c")), wants(5), 200)[0]
    assert core.cache.stats().pages_used == 0


STOPS = [
    ({}, "stop"),  # the model's own end
    ({"ignore_eos": True}, "length"),
    ({"stop_token_ids": (3,)}, "stop"),
    ({"stop_token_ids": (3,), "min_tokens": 4}, "stop"),
    ({"min_tokens": 30}, "length"),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("wishes", "finish"), STOPS)
def test_stop_ids_length_and_min_tokens(wishes: dict[str, Any], finish: str, overlap: bool) -> None:
    params = SamplingParams(max_tokens=30, **wishes)
    core = make_core(overlap=overlap)
    first = next(i for i in range(99) if plain_answer(prompt(6, i), params, 200)[1] == finish)
    core.submit("a", prompt(6, first), params)
    answers = run(core)
    expected, end = plain_answer(prompt(6, first), params, 200)
    assert (answers.tokens["a"], answers.finish["a"]) == (expected, end)
    assert end == finish
    assert len(expected) > params.min_tokens or end == "length"
    stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    assert not stops & set(expected[: params.min_tokens])


def test_a_context_that_is_full_ends_by_length() -> None:
    core = make_core(pages=5, page_tokens=4, max_context=20)
    core.submit("a", prompt(15), SamplingParams(ignore_eos=True))
    assert len(run(core).tokens["a"]) == 5


def test_what_can_never_be_served_is_refused_at_once() -> None:
    core = make_core(pages=5, page_tokens=4, max_context=20)
    for tokens, params, word in (
        ([], GREEDY, "at least one token"),
        (prompt(20), GREEDY, "the longest context is 20 tokens"),
        ([1, VOCAB], GREEDY, f"the vocabulary has {VOCAB} tokens"),
        ([-1, 2], GREEDY, f"the vocabulary has {VOCAB} tokens"),
        (prompt(3), SamplingParams(logit_bias=((VOCAB, 1.0),)), f"the vocabulary has {VOCAB} tokens"),
    ):
        with pytest.raises(UsageError) as refused:
            core.submit("a", tokens, params)
        assert word in refused.value.refusal.found
    assert core.idle


# ------------------------------------------------------------------------------------------- the prefix cache


def test_a_prefix_is_computed_once() -> None:
    core = make_core(page_tokens=4)
    core.submit("a", prompt(14), wants(2))
    first = run(core)
    core.submit("b", prompt(14), wants(2))
    second = run(core)
    assert second.tokens["b"] == first.tokens["a"]
    assert shapes(core)[-2] == [("b", 2)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hybrid_resumes_from_a_snapshot_and_waits_while_one_is_due(overlap: bool) -> None:
    """The first prompt stops at 12, the last page's end before its last token; the second one starts there."""
    core = make_core(page_tokens=4, hybrid=True, overlap=overlap, max_step_tokens=32)
    core.submit("a", prompt(14), wants(2))
    run(core)
    assert [n for plan in shapes(core) for _, n in plan] == [12, 2, 1]
    core.submit("b", prompt(14), wants(2))
    answers = run(core)
    assert answers.tokens["b"] == plain_answer(prompt(14), wants(2), 200)[0]
    assert [n for plan in shapes(core)[3:] for _, n in plan] == [2, 1]
    assert not simulated(core).faults
