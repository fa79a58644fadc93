"""The router's choice against transformers and its own definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.ops.routing import router_topk
from freetoken.testing.fakes import normal


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (512, 10), (4, 4)])
def test_equals_softmax_then_topk(experts: int, top_k: int, renormalise: bool) -> None:
    """Oracle: softmax in float64, then torch.topk, as transformers' routers do it."""
    logits = 2 * normal(1)(9, experts)
    weights, chosen = router_topk(logits, top_k, renormalise)
    want, want_ids = torch.topk(torch.softmax(logits.double(), -1), top_k, dim=-1)
    if renormalise:
        want = want / want.sum(-1, keepdim=True)
    assert weights.dtype == torch.float32
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen.long(), want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-7)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=5), st.integers(1, 6))
def test_ties_go_to_the_lower_expert(rows: list[list[int]], top_k: int) -> None:
    """Oracle: Python's stable sort by falling logit."""
    _, chosen = router_topk(torch.tensor(rows, dtype=torch.bfloat16), top_k, True)
    for row, got in zip(rows, chosen.tolist(), strict=True):
        assert got == sorted(range(6), key=lambda e: -row[e])[:top_k]
