"""Enumeration. Oracle: asking Triton's binder at every point of the space, one by one."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import spaces

from freetoken.ops.triton_stub import Target, specialisation_key
from freetoken.vocab.launch import StepPoint
from freetoken.warmup.enumerate import enumerate_keys
from freetoken.warmup.launch_space import DeclaredLaunchSpace, build_launch_space


def build(*functions, space=None) -> DeclaredLaunchSpace:
    parts = [("a", tuple((spaces.SHAPE, function) for function in functions))]
    return build_launch_space(space or spaces.space(), parts, spaces.H200)


@pytest.mark.parametrize("function", [spaces.flat, spaces.bucketed, spaces.unbounded, spaces.specialising])
def test_all_keys_over_every_token_count_are_found(function) -> None:
    """Oracle: the binder at every token count from 1 to the maximum."""
    top = 300
    brute: dict[str, list[int]] = {}
    for tokens in range(1, top + 1):
        (launch,) = function(StepPoint(tokens, 1, tokens, tokens, 1, False), spaces.SHAPE, spaces.H200)
        brute.setdefault(specialisation_key(launch, Target(90)), []).append(tokens)
    found = enumerate_keys(build(function, space=spaces.space(tokens=top, sequences=20)))
    assert found.keys == brute.keys()
    for key, points in found.witnesses.items():
        assert points[0].tokens == min(brute[key])
        assert points[-1].tokens == max(brute[key])


def test_8192_token_counts_are_walked_exhaustively() -> None:
    """By hand: five buckets, each found at both of its ends, the maximum included."""
    found = enumerate_keys(build(spaces.bucketed))
    ends = sorted((points[0].tokens, points[-1].tokens) for points in found.witnesses.values())
    assert ends == [(1, 16), (17, 64), (65, 256), (257, 1024), (1025, 8192)]
    assert found.points >= 8192


def test_a_variable_read_in_one_branch_alone_is_walked_too() -> None:
    """By hand: prefill, short decode and long decode are three keys; 4096 and 4097 part the latter two."""
    found = enumerate_keys(build(spaces.by_mode))
    assert len(found.keys) == 3
    decodes = [p for points in found.witnesses.values() for p in points if p.decode]
    assert max(p.max_context for p in decodes) == 40_960


def test_every_witness_meets_its_key() -> None:
    built = build(spaces.flat, spaces.bucketed, spaces.by_mode, spaces.native)
    for key, points in enumerate_keys(built).witnesses.items():
        assert all(key in built.keys("a", point) for point in points)


def test_reachable_keys_below_a_cap_are_those_of_the_capped_space() -> None:
    built = build(spaces.bucketed, spaces.native)
    whole = enumerate_keys(built)
    for cap in (1, 2, 8, 16, 17, 100, 101, 8191, 8192):
        assert whole.reachable(cap) == enumerate_keys(built, built.space.capped(cap)).keys


def test_a_launch_space_that_is_not_ours_is_walked_through_its_protocol() -> None:
    """Oracle: our own class asked for the same."""
    built = build(spaces.by_mode, space=spaces.space(tokens=40, sequences=4, context=5000))

    class Foreign:
        space, kinds, opaque = built.space, ("k",), ()

        def launches(self, kind, point):
            return built.launches("a", point)

        def keys(self, kind, point):
            return built.keys("a", point)

    assert enumerate_keys(Foreign()).keys == enumerate_keys(built).keys


def test_requests_cover_the_triton_keys() -> None:
    found = enumerate_keys(build(spaces.bucketed, spaces.native))
    requests = found.requests(spaces.H200)
    assert {request.key for request in requests} == {key for key in found.keys if not key.startswith("native:")}
    assert len(requests) == 5
