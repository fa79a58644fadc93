"""The lint of launch spaces: each fault once, on a tiny kernel made for it."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import spaces

from freetoken.vocab.launch import StepPoint
from freetoken.warmup.launch_space import build_launch_space
from freetoken.warmup.lint import lint, reaches_maximum


def found(*functions) -> set[tuple[str, str]]:
    parts = [("a", tuple((spaces.SHAPE, function) for function in functions))]
    return {(f.rule, f.name) for f in lint(build_launch_space(spaces.space(), parts, spaces.H200))}


def test_good_spaces_pass() -> None:
    assert found(spaces.flat, spaces.bucketed, spaces.by_mode, spaces.native) == set()


@pytest.mark.parametrize(
    ("function", "finding"),
    [
        (spaces.unbounded, ("constexpr", "BLOCK")),
        (spaces.specialising, ("specialises", "tokens")),
        (spaces.tuned, ("autotune", "Autotuner")),
        (spaces.silent_top, ("maximum", "max_context")),
        (spaces.half_open, ("maximum", "tokens")),
    ],
)
def test_each_fault_is_found(function, finding) -> None:
    assert finding in found(spaces.flat, function)


def test_a_function_without_an_answer_is_reported_with_the_step() -> None:
    parts = [("a", ((spaces.SHAPE, spaces.half_open),))]
    findings = lint(build_launch_space(spaces.space(), parts, spaces.H200))
    assert any(f.rule == "raises" and "tokens=8192" in str(f) for f in findings)


def test_integers_that_cross_two_to_the_31_are_found_although_not_specialised() -> None:
    def wide(point, shape, device):
        return spaces.one("by_row", point.tokens * 2**20, 128)

    assert found(wide) == {("specialises", "tokens")}


def test_what_a_shape_fixes_is_no_fault() -> None:
    """The same kernel at two sizes of the model: two classes, but no step changes either."""

    def fixed(point, shape, device):
        return spaces.one("specialising", shape.cols, 128)

    from attrs import evolve

    parts = [("a", ((spaces.SHAPE, fixed), (evolve(spaces.SHAPE, cols=100), fixed)))]
    assert lint(build_launch_space(spaces.space(), parts, spaces.H200)) == ()


def test_a_ladder_must_reach_the_maximum() -> None:
    def steps(*tokens: int) -> list[StepPoint]:
        return [StepPoint(t, 1, t, t, 1, False) for t in tokens]

    assert reaches_maximum(steps(1, 16, 8192), spaces.space()) == ()
    (finding,) = reaches_maximum(steps(1, 16, 8191), spaces.space())
    assert "8191" in finding.found
    assert reaches_maximum([], spaces.space())
