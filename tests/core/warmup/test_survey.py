"""Surveys. Oracles: an enumeration, launch functions asked one by one, and JSON written and read again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import spaces

from freetoken.vocab.launch import LibraryCall, StepPoint, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken.warmup.enumerate import enumerate_keys
from freetoken.warmup.launch_space import DeclaredLaunchSpace, build_launch_space
from freetoken.warmup.parts import OnRows, model_parts
from freetoken.warmup.survey import library_call, made_survey, native_module, remember, survey, survey_of
from freetoken.warmup.survey_json import survey_from_json, survey_to_json
from freetoken.warmup.survey_worker import survey_in_children

SMALL = spaces.space(tokens=300, sequences=20, context=2000)
HEAD = OpShape("linear", "bfloat16", rows=999, cols=64)


def product(point: StepPoint, shape: OpShape, device: object) -> tuple[LibraryCall, ...]:
    """A library from the 17th row on."""
    return (LibraryCall(f"product of {shape.rows}", sweep=lambda rows: None),) if point.tokens > 16 else ()


def build() -> DeclaredLaunchSpace:
    layer = OpShape("linear", "bfloat16", rows=64, cols=64)
    launches = {spaces.SHAPE: spaces.bucketed, layer: product, HEAD: product}
    parts = [("embed", ()), ("layers.0", (spaces.SHAPE, layer)), ("layers.1", (spaces.SHAPE, layer)), ("head", (HEAD,))]
    attention = {
        0: (OpShape("attention", "bfloat16"), spaces.by_mode),
        1: (OpShape("attention", "bfloat16"), spaces.by_mode),
    }
    return build_launch_space(SMALL, model_parts(parts, launches, attention), spaces.H200)


def test_keys_are_those_of_an_enumeration() -> None:
    assert survey(build()).uses == enumerate_keys(build()).uses


def test_layers_count_tokens_and_the_head_counts_rows() -> None:
    """By hand: layers get up to 300 rows, the head one for each of at most 20 sequences."""
    found = {use.name: (use.low, use.high, use.counts) for use in survey(build()).libraries}
    assert found == {"product of 64": (17, 300, "tokens"), "product of 999": (17, 20, "rows")}


def test_a_head_sees_rows_as_its_tokens() -> None:
    """Oracle: the launch function asked with as many tokens as there are rows."""
    wrapped = OnRows(spaces.bucketed)
    for rows in (1, 16, 17, 20):
        point = StepPoint(300, 20, 281, 400, rows, decode=False)
        alone = StepPoint(rows, rows, 1, 400, rows, decode=False)
        assert wrapped(point, HEAD, spaces.H200) == spaces.bucketed(alone, HEAD, spaces.H200)


def test_attention_is_a_part_of_its_layers() -> None:
    built = build()
    assert built.kinds == ("embed", "layers.0", "head")
    assert any("BLOCK" in str(x) for x in built.launches("layers.0", StepPoint(1, 1, 1, 2, 1, decode=True)))
    assert len(built.ops("layers.0")) == 3


def test_children_find_what_this_process_finds() -> None:
    """``spaces`` is importable in a child, since its path is sent along; what is not is walked in this process."""
    parts = [("a", ((spaces.SHAPE, spaces.bucketed),)), ("b", ((spaces.SHAPE, spaces.native), (HEAD, product)))]
    built = build_launch_space(SMALL, parts, spaces.H200)
    found = survey_in_children(built, 2)
    assert found.keys == survey(built).keys
    assert found.libraries == survey(built).libraries
    assert {k: u.witnesses for k, u in found.uses.items()} == {k: u.witnesses for k, u in survey(built).uses.items()}


def test_a_closure_is_walked_here() -> None:
    secret = 128

    def closed(point: StepPoint, shape: OpShape, device: object) -> tuple[TritonLaunch, ...]:
        return spaces.one("by_row", point.tokens, secret)

    built = build_launch_space(SMALL, [("a", ((spaces.SHAPE, closed),))], spaces.H200)
    assert survey_in_children(built, 1).keys == survey(built).keys


def test_a_survey_comes_back_from_json_as_it_was() -> None:
    found = survey(build())
    again = survey_from_json(json.loads(json.dumps(survey_to_json(found))))
    assert again == found
    for key, use in found.uses.items():
        launch = again.uses[key].launch
        assert isinstance(launch, TritonLaunch)
        assert launch == use.launch


def test_what_cannot_be_kept_is_asked_for_again() -> None:
    """Native modules and sweeps are code: the survey keeps where they are, the launch space still has them."""
    built = build_launch_space(SMALL, [("a", ((spaces.SHAPE, spaces.native),))], spaces.H200)
    again = survey_from_json(json.loads(json.dumps(survey_to_json(survey(built)))))
    for use in again.uses.values():
        assert use.launch is None
        assert native_module(built, use).name in use.key
    (library,) = again.libraries
    assert library_call(built, library).name == "gemm"


@pytest.mark.parametrize(
    "damage", [{}, {"keys": {"k": {}}, "libraries": []}, {"keys": {}, "libraries": [{"name": "x"}]}]
)
def test_damaged_json_is_no_survey(damage: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        survey_from_json(damage)


def test_a_survey_is_made_once_and_may_be_brought() -> None:
    built, calls = build(), []
    assert made_survey(built) is None
    remember(built, lambda: calls.append(1) or survey(built))  # type: ignore[func-returns-value]
    assert made_survey(built) is None, "nobody has asked yet"
    assert survey_of(built) is survey_of(built)
    assert calls == [1]
    other = build()
    remember(other, survey_of(built))
    assert survey_of(other) is survey_of(built)
