"""Launch spaces. Oracles: the launch functions asked directly, and kinds counted by hand."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import spaces

from freetoken.ops.triton_stub import Target, specialisation_key
from freetoken.vocab.errors import PluginError
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.ops import OpShape
from freetoken.warmup.keys import is_native, kernel_of, short
from freetoken.warmup.launch_space import build_launch_space
from freetoken.warmup.points import INTEGERS, points_over, settle

OTHER = OpShape("rms_norm", "bfloat16", cols=4096)
SMALL = spaces.space(tokens=300, sequences=20, context=5000)


def test_kinds_are_computed_from_launches_not_from_names() -> None:
    """By hand: equal shapes, and unequal shapes whose launches agree everywhere, are one kind."""
    built = build_launch_space(
        SMALL,
        [
            ("layer 0", ((spaces.SHAPE, spaces.flat), (spaces.SHAPE, spaces.by_mode))),
            ("layer 1", ((spaces.SHAPE, spaces.flat), (spaces.SHAPE, spaces.by_mode))),
            ("layer 2", ((OTHER, spaces.flat), (OTHER, spaces.by_mode))),
            ("layer 3", ((spaces.SHAPE, spaces.flat),)),
            ("layer 4", ((spaces.SHAPE, spaces.bucketed), (spaces.SHAPE, spaces.by_mode))),
        ],
        spaces.H200,
    )
    assert built.kinds == ("layer 0", "layer 3", "layer 4")
    assert built.parts("layer 0") == ("layer 0", "layer 1", "layer 2")


def test_a_difference_in_one_branch_alone_makes_another_kind() -> None:
    """``by_mode`` and ``flat`` of one token count agree in prefill; only long decodes tell them apart."""

    def nearly(point, shape, device):
        return spaces.by_mode(point, shape, device) if not point.decode else spaces.one("by_row", 16, 64)

    built = build_launch_space(
        SMALL, [("a", ((spaces.SHAPE, spaces.by_mode),)), ("b", ((spaces.SHAPE, nearly),))], spaces.H200
    )
    assert built.kinds == ("a", "b")


def test_opaque_kernels_are_listed_and_separate_kinds() -> None:
    experts = OpShape("experts", "bfloat16", experts=8)
    built = build_launch_space(
        SMALL,
        [("a", ((spaces.SHAPE, spaces.flat), (experts, None))), ("b", ((spaces.SHAPE, spaces.flat),))],
        spaces.H200,
    )
    assert built.opaque == ("experts",)
    assert built.kinds == ("a", "b")


def test_launches_and_keys_are_those_of_the_functions() -> None:
    """Oracle: the functions asked directly, and the binder asked for each launch."""
    functions = (spaces.flat, spaces.bucketed, spaces.by_mode)
    built = build_launch_space(SMALL, [("a", tuple((spaces.SHAPE, f) for f in functions))], spaces.H200)
    for point in points_over(SMALL, ("decode", "max_context")):
        expected = [launch for f in functions for launch in f(point, spaces.SHAPE, spaces.H200)]
        assert list(built.launches("a", point)) == expected
        assert [x.grid for x in built.launches("a", point)] == [x.grid for x in expected]
        assert built.keys("a", point) == {specialisation_key(x, Target(90)) for x in expected}


def test_native_modules_have_keys_and_library_calls_have_none() -> None:
    built = build_launch_space(SMALL, [("a", ((spaces.SHAPE, spaces.native),))], spaces.H200)
    (key,) = built.keys("a", StepPoint(7, 1, 7, 7, 1, False))
    assert key == "native:module-False"
    assert is_native(key)
    assert kernel_of(key) == "module-False"
    assert len(built.launches("a", StepPoint(7, 1, 7, 7, 1, False))) == 2


def test_short_keys_tell_keys_apart() -> None:
    keys = {specialisation_key(spaces.one("by_row", 5, block)[0], Target(90)) for block in (16, 32, 64)}
    assert len({short(key) for key in keys}) == 3
    assert all(short(key).startswith("by_row#") for key in keys)


def test_an_impure_launch_function_is_refused() -> None:
    calls = []

    def impure(point, shape, device):
        calls.append(1)
        _ = point.tokens if len(calls) % 2 else point.rows
        return spaces.one("by_row", point.sequences, 128)

    built = build_launch_space(SMALL, [("a", ((spaces.SHAPE, impure),))], spaces.H200)
    built.launches("a", StepPoint(7, 1, 7, 7, 1, False))
    with pytest.raises(PluginError, match="pure"):
        built.launches("a", StepPoint(8, 1, 8, 8, 1, False))


@given(
    tokens=st.integers(1, 300),
    first=st.sampled_from(("", *INTEGERS)),
    wanted=st.fixed_dictionaries({name: st.integers(-1, 5100) for name in INTEGERS}),
    decode=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_settled_points_are_feasible_and_keep_what_was_asked(tokens, first, wanted, decode) -> None:
    """Property: every constraint of the step space, checked independently of how a point was found."""
    small = spaces.space(tokens=tokens, sequences=min(20, tokens), context=5000)
    point = settle(small, wanted, first, decode, "fast")
    if point is None:
        return
    if first:
        assert getattr(point, first) == wanted[first]
    assert 1 <= point.rows <= point.sequences <= point.tokens <= tokens
    assert point.max_query <= point.max_context <= 5000
    assert point.sequences * point.max_query >= point.tokens >= point.sequences + point.max_query - 1
    if point.tokens == 1 and not decode:
        assert point.max_context == 1
    if decode:
        assert point.tokens == point.sequences == point.rows
        assert (point.max_query, point.max_context >= 2) == (1, True)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_every_feasible_value_of_every_variable_is_walked(tokens: int) -> None:
    """Oracle: all steps of a small space, listed by brute force."""
    small = spaces.space(tokens=tokens, sequences=min(4, tokens), context=40)
    everything = [
        StepPoint(t, b, q, c, r, False)
        for t in range(1, tokens + 1)
        for b in range(1, min(4, t) + 1)
        for q in range(-(-t // b), t - b + 2)
        for c in range(q, 41 if t > 1 else 2)
        for r in range(1, b + 1)
    ] + [StepPoint(b, b, 1, c, b, True) for b in range(1, min(4, tokens) + 1) for c in range(2, 41)]
    for name in INTEGERS:
        for decode in (False, True):
            brute = {getattr(p, name) for p in everything if p.decode is decode}
            assert {getattr(p, name) for p in points_over(small, (name, "decode")) if p.decode is decode} == brute
