"""The ladder on published dimensions, at every cap that anybody may set. Oracle: the launch space, asked for what each
step covers; no step's own word is taken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from attrs import evolve

pytest.importorskip("triton")
pytest.importorskip("freetoken_kernels_triton")
pytest.importorskip("freetoken_attention_triton")
pytest.importorskip("freetoken_warmup_ladder")
sys.path.insert(0, str(Path(__file__).parents[2] / "core" / "warmup"))

import published

from freetoken.builtin import BUILTINS
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.selection import Selection
from freetoken.testing.launches import DEVICES
from freetoken.testing.plans import launch_space_of, planned
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Capture, CompileKeys, Forward, Known, LoadKeys, Touch, WarmupStep
from freetoken.warmup.cover import aspects_of, needed_aspects, redundant, uncovered
from freetoken.warmup.launch_space import DeclaredLaunchSpace
from freetoken.warmup.survey import survey_of
from freetoken_warmup_ladder.options import LadderOptions
from freetoken_warmup_ladder.policy import Ladder

H200 = evolve(DEVICES["h200"], memory_total_bytes=150 * 10**9, memory_free_bytes=148 * 10**9)
CONFIGS = {"qwen3-moe": published.qwen3_moe, "qwen3.6": published.qwen3_6_moe}
CAPS = (*range(1, 301), 4096, 8192)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest) -> tuple[Plan, DeclaredLaunchSpace]:
    plugins = build_plugins(Selection(), BUILTINS)
    resolved = planned(CONFIGS[request.param](), H200, plugins=plugins)
    return resolved.plan, launch_space_of(resolved, plugins)


def ladder(model: tuple[Plan, DeclaredLaunchSpace], cap: int | None, known: Known | None = None) -> list[WarmupStep]:
    plan, space = model
    return list(Ladder(LadderOptions(max_tokens=cap)).steps(plan, space, known or Known()))


def test_every_cap_is_covered_without_a_step_too_many(model: tuple[Plan, DeclaredLaunchSpace]) -> None:
    """Every reachable key is compiled, loaded and launched; dropping any one step loses something."""
    _, space = model
    for cap in CAPS:
        steps = ladder(model, cap)
        needed = needed_aspects(space, cap)
        covered = frozenset().union(*(aspects_of(step, space) for step in steps))
        assert needed <= covered, f"cap {cap}: {sorted(map(str, needed - covered))}"
        assert not redundant(steps, space, needed), f"cap {cap}"
        for index in range(len(steps)):
            rest = frozenset().union(*(aspects_of(s, space) for i, s in enumerate(steps) if i != index))
            assert not needed <= rest, f"cap {cap}: {steps[index]} can be dropped"
        assert all(s.point.tokens <= cap for s in steps if isinstance(s, Forward))


def test_a_low_cap_says_what_it_leaves_uncovered(model: tuple[Plan, DeclaredLaunchSpace]) -> None:
    """By brute force: the keys that no step of at most so many tokens launches, found step by step."""
    _, space = model
    survey = survey_of(space)
    for cap in (1, 2, 3, 8, 16, 64, 300, 8192):
        missing = set(uncovered(ladder(model, cap), space))
        assert missing == survey.keys - survey.reachable(cap)
        assert all(use.witnesses[0].tokens > cap for key, use in survey.uses.items() if key in missing)
    assert not uncovered(ladder(model, None), space)
    assert uncovered(ladder(model, 64), space)


def test_contexts_are_never_capped(model: tuple[Plan, DeclaredLaunchSpace]) -> None:
    """A cap of two tokens still warms a decode step in the longest context."""
    plan, _ = model
    longest = max(s.point.max_context for s in ladder(model, 2) if isinstance(s, Forward))
    assert longest > 2048 or plan.max_seq_tokens < 2048


def test_a_proven_start_loads_sweeps_and_runs_one_forward(model: tuple[Plan, DeclaredLaunchSpace]) -> None:
    _, space = model
    known = Known(compiled=survey_of(space).keys, proven=True, because="a manifest")
    kinds = [type(step) for step in ladder(model, None, known)]
    assert CompileKeys not in kinds
    assert kinds.count(LoadKeys) == 1
    assert kinds.count(Forward) == 1
    assert kinds.count(Touch) == len(survey_of(space).libraries)
    assert kinds.count(Capture) == 1


def test_a_key_that_is_new_is_compiled_alone(model: tuple[Plan, DeclaredLaunchSpace]) -> None:
    _, space = model
    keys = sorted(survey_of(space).keys)
    known = Known(compiled=frozenset(keys[1:]), proven=True, because="an older manifest")
    compiled = [step.keys for step in ladder(model, None, known) if isinstance(step, CompileKeys)]
    assert compiled == [(keys[0],)]


def test_the_head_is_swept_at_rows_and_the_layers_at_tokens(model: tuple[Plan, DeclaredLaunchSpace]) -> None:
    """By hand: 32 requests run at once, so the head's product has at most 32 rows, however long a chunk is."""
    plan, _ = model
    rows = {step.name: step.tokens for step in ladder(model, None) if isinstance(step, Touch)}
    head = next(name for name in rows if name.startswith(f"linear {plan.model.vocab_size}x"))
    assert max(rows.pop(head)) == plan.max_running_requests
    assert {max(tokens) for tokens in rows.values()} == {plan.max_prefill_tokens}
