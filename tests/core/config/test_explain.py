"""The plan as people and scripts read it. Oracle: the plan itself, item by item."""

from __future__ import annotations

import json

import pytest
from attrs import evolve

from freetoken.config.engine_options import CoreOptions
from freetoken.config.explain import broken_candidates, choices_summary, plan_json, plan_text
from freetoken.models import llama, mixtral, qwen3_next
from freetoken.testing.plans import planned
from freetoken.vocab.plan import CandidateNote, Choice, OptionValue, Plan
from freetoken.vocab.units import format_bytes

FAMILIES = (llama, mixtral, qwen3_next)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda m: m.NAME)
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(request.param.tiny(), dtype="float32", options=CoreOptions(max_seq_len=100)).plan


def every_choice(plan: Plan) -> list[Choice]:
    return [*plan.attention, plan.moe, plan.warmup, *(k.choice for k in plan.kernels)]


def test_the_text_holds_every_decision_with_its_reason(plan: Plan) -> None:
    lines = plan_text(plan).splitlines()
    for decision in plan.decisions:
        value = format_bytes(decision.value) if decision.name.endswith("_bytes") else decision.value
        assert any(
            line.split()[:1] == [decision.name] and f"{value}  ({decision.because})" in line for line in lines
        ), decision


def test_the_text_holds_every_choice_with_its_candidates(plan: Plan) -> None:
    text = plan_text(plan)
    for choice in every_choice(plan):
        assert f"{choice.kind}" in text
        assert f": {choice.name}  ({choice.because})" in text
        for note in choice.candidates:
            if note.name != choice.name:
                assert f"      {note.name}: {note.why}" in text


def test_the_text_holds_every_claim(plan: Plan) -> None:
    text = plan_text(plan)
    for claim in plan.claims:
        assert any(
            claim.owner in line and format_bytes(claim.steady_bytes) in line and claim.what in line
            for line in text.splitlines()
        ), claim
    assert f"memory ({format_bytes(plan.memory_bytes)} allowed)" in text


def test_the_json_is_plain_data_with_the_same_content(plan: Plan) -> None:
    """Oracle: the round trip through JSON."""
    found = plan_json(plan)
    assert json.loads(json.dumps(found)) == found
    assert [(d["name"], d["because"]) for d in found["decisions"]] == [(d.name, d.because) for d in plan.decisions]  # type: ignore[attr-defined]
    shown = {
        (c["kind"], c["name"], c["because"], tuple((n["name"], n["fits"], n["why"]) for n in c["candidates"]))
        for c in found["choices"]  # type: ignore[attr-defined]
    }
    meant = {
        (c.kind, c.name, c.because, tuple((n.name, n.fits, n.why) for n in c.candidates)) for c in every_choice(plan)
    }
    assert shown == meant
    assert [m["owner"] for m in found["memory"]] == [c.owner for c in plan.claims]  # type: ignore[attr-defined]


def test_kernels_of_one_op_that_went_one_way_are_one_line(plan: Plan) -> None:
    text = plan_text(plan)
    ways = {(k.shape.op, k.choice.name, k.choice.candidates) for k in plan.kernels}
    assert text.count("  kernel for ") == len(ways)


def test_given_options_are_shown_with_their_origin_and_defaults_are_not(plan: Plan) -> None:
    values = (
        OptionValue("core", "port", 1, "FREETOKEN_PORT"),
        OptionValue("core", "host", "nowhere.example", "default"),
    )
    text = plan_text(evolve(plan, options=values))
    assert "port = 1  (FREETOKEN_PORT)" in text
    assert "nowhere" not in text


def test_the_log_line_names_what_runs(plan: Plan) -> None:
    line = choices_summary(plan)
    assert "\n" not in line
    assert f"warmup {plan.warmup.name}" in line
    assert ("(unused)" in line) == (plan.model.moe is None)
    for kernel in plan.kernels:
        assert kernel.choice.name in line
        assert kernel.shape.op in line


def test_only_broken_candidates_are_worth_a_warning(plan: Plan) -> None:
    assert broken_candidates(plan) == ()
    broken = CandidateNote("fast", False, "its probe failed: ImportError: libfast.so")
    other = CandidateNote("elsewhere", False, "it runs on cuda, not on cpu")
    attention = Choice("attention backend", "attention", "torch", "the only one that fits", (broken, other))
    found = broken_candidates(evolve(plan, attention=(attention, attention)))
    assert found == ("attention backend fast: its probe failed: ImportError: libfast.so",)
