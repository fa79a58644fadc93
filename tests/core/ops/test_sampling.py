"""The sample op's cuts against a sorted list in plain Python, and its draw against the distribution function."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.ops import sampling
from freetoken.ops.philox import uniform
from freetoken.ops.sampling import draw, sample, threshold


def survivors(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, with sorted lists: k largest and their equals, then the nucleus and its equals, then min-p."""
    scaled = [(x - max(logits)) / temperature for x in logits]
    kept = set(range(len(scaled)))
    if 0 < top_k < len(scaled):
        kth = sorted(scaled, reverse=True)[top_k - 1]
        kept = {i for i in kept if scaled[i] >= kth}
    mass = math.fsum(math.exp(scaled[i]) for i in kept)
    if top_p < 1:
        kept = {i for i in kept if math.fsum(math.exp(scaled[j]) for j in kept if scaled[j] > scaled[i]) < top_p * mass}
    return {i for i in kept if min_p == 0 or scaled[i] >= math.log(min_p)}


def row(temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.tensor([temperature]), torch.tensor([top_k]).int(), torch.tensor([top_p]), torch.tensor([min_p])


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8), min_size=2, max_size=30), temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 29, 100]), top_p=st.sampled_from([0.1, 0.43, 0.77, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.4]), first_slice=st.sampled_from([2, 256]),
)  # fmt: skip
def test_cuts_keep_the_defined_tokens(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float, first_slice: int
) -> None:
    """Oracle: sorted lists in Python. Whole-number logits make ties; a first slice of 2 makes the wide pass run."""
    values = torch.tensor([logits], dtype=torch.float32)
    _, k, p, m = row(temperature, top_k, top_p, min_p)
    scaled = (values - values.amax()) / temperature
    original = sampling.FIRST_SLICE_TOKENS
    sampling.FIRST_SLICE_TOKENS = first_slice
    try:
        cut = threshold(scaled, k, p, m)
    finally:
        sampling.FIRST_SLICE_TOKENS = original
    kept = set((scaled >= cut)[0].nonzero().flatten().tolist())
    assert kept == survivors([float(x) for x in logits], temperature, top_k, float(p), float(m))


def test_the_path_of_a_gpu_cuts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the path of a CPU, on rows of every mixture, against the one that sorts the whole vocabulary."""
    rows = 60
    scaled = torch.randn(rows, 500, generator=torch.Generator().manual_seed(0)) * 3
    scaled -= scaled.amax(-1, keepdim=True)
    k = torch.arange(rows).int() % 9 * 20
    p = torch.tensor([1.0, 0.9, 0.3, 0.99])[torch.arange(rows) % 4]
    off = torch.zeros(rows)
    cpu = threshold(scaled, k, p, off)
    assert torch.equal(sampling._sorted_cut(scaled, 500, k, p)[0], cpu)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True, width=32))
def test_draw_is_the_inverse_of_the_distribution_function(logits: list[int], u: float) -> None:
    """Oracle: running sums in Python: the lowest id whose sum exceeds u times the whole."""
    weights = [math.exp(x - max(logits)) for x in logits]
    total, running, expected = math.fsum(weights), 0.0, len(logits) - 1
    near = False
    for token, weight in enumerate(weights):
        near = near or abs(running + weight - u * total) < 1e-6 * total
        if running + weight > u * total:
            expected = token
            break
        running += weight
    scaled = torch.tensor([logits], dtype=torch.float32) - max(logits)
    drawn = int(draw(scaled, torch.full((1, 1), -math.inf), torch.tensor([u])))
    assert near or drawn == expected


def test_the_extremes_of_u_stay_among_the_survivors() -> None:
    """Oracle: the cut tokens: at u = 0 the first survivor is drawn, just below 1 the last."""
    scaled = torch.tensor([[-9.0, -1.0, 0.0, -9.0, -1.0, -9.0]])
    cut = torch.tensor([[-2.0]])
    below_one = torch.tensor([1 - 2**-24])
    assert int(draw(scaled, cut, torch.tensor([0.0]))) == 1
    assert int(draw(scaled, cut, below_one)) == 4


def test_a_tiny_temperature_is_greedy() -> None:
    """Oracle: arg max, at temperatures whose division overflows float32."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 40
    for temperature in (1e-6, 1e-30, 1e-44):
        args = row(temperature, 0, 1.0, 0.0)
        drawn = sample(logits, *args, torch.tensor([3]), torch.tensor([9]))
        assert torch.equal(drawn, logits.argmax(-1))


def test_forbidden_tokens_are_never_drawn() -> None:
    """Oracle: the tokens at minus infinity, over 2,000 draws of a row that is hot and uncut."""
    logits = torch.zeros(2000, 12)
    logits[:, [0, 5, 11]] = float("-inf")
    n = len(logits)
    args = (torch.full((n,), 2.0), torch.zeros(n).int(), torch.ones(n), torch.zeros(n))
    drawn = sample(logits, *args, torch.zeros(n, dtype=torch.int64), torch.arange(n))
    assert set(drawn.tolist()) == {1, 2, 3, 4, 6, 7, 8, 9, 10}


def test_u_is_the_only_chance() -> None:
    """Oracle: the draw made by hand from philox's number."""
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(2))
    seeds, steps = torch.arange(8) * 11, torch.arange(8) + 100
    args = (torch.ones(8), torch.zeros(8).int(), torch.ones(8), torch.zeros(8))
    scaled = logits - logits.amax(-1, keepdim=True)
    by_hand = draw(scaled, torch.full((8, 1), -math.inf), uniform(seeds, steps))
    assert torch.equal(sample(logits, *args, seeds, steps), by_hand)
