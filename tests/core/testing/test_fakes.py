"""The stand-ins keep the contract of what they stand for; the tolerances let rounding pass and faults not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.testing.fakes import load_specs, make_batch, pages_needed, sequence_slots
from freetoken.testing.tolerances import assert_close, tolerance
from freetoken.vocab.ops import OPS


@settings(max_examples=50, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), min_size=1, max_size=6),
    page=st.sampled_from([1, 16, 32]), contiguous=st.booleans(),
)  # fmt: skip
def test_a_batch_is_consistent(lens: list[tuple[int, int]], page: int, contiguous: bool) -> None:
    """Property: the invariants that ``vocab.batch`` documents; pages are nobody else's and never page 0."""
    query, prefix = (tuple(column) for column in zip(*lens, strict=True))
    batch = make_batch(query, prefix, page, contiguous=contiguous)
    assert batch.query_starts.diff().tolist() == list(query)
    assert batch.context_lens.tolist() == [q + p for q, p in lens]
    owned = [sequence_slots(batch, b, page) for b in range(len(lens))]
    pages = torch.cat([(slots // page).unique() for slots in owned])
    assert len(pages) == len(pages.unique()) == pages_needed(query, prefix, page)
    assert 0 not in pages
    new = torch.cat([slots[p:] for slots, p in zip(owned, prefix, strict=True)])
    assert torch.equal(batch.kv_slots, new)
    assert torch.equal(batch.positions, torch.cat([torch.arange(p, p + q) for q, p in lens]))
    assert batch.tokens[batch.logit_rows].tolist() == [batch.tokens[s - 1] for s in batch.query_starts[1:].tolist()]
    assert not contiguous or all((slots.diff() == 1).all() for slots in owned)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_passes_and_a_wrong_term_fails(dtype: str) -> None:
    """Oracle: a sum of 256 terms rounded to the dtype; and the same with one term left out."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 256, generator=generator).to(getattr(torch, dtype)) / 4 for _ in "ab")
    exact = (a.double() * b.double()).sum(-1)
    assert_close((a.float() * b.float()).sum(-1).to(a.dtype), exact, dtype, 256)
    with pytest.raises(AssertionError, match=dtype):
        assert_close((a.float() * b.float())[:, 1:].sum(-1).to(a.dtype), exact, dtype, 256)


def test_nan_and_shape_never_pass() -> None:
    """Oracle: the definition."""
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([float("nan")]), torch.ones(1), "float32")
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2), torch.ones(1), "float32")


def test_tolerances_order_like_the_dtypes() -> None:
    """Oracle: the dtypes' precision, and longer sums are looser."""
    steps = [tolerance(d, 64) for d in ("float32", "float16", "bfloat16")]
    assert steps[0].atol < steps[1].atol < steps[2].atol
    assert tolerance("float32", 4096).atol > tolerance("float32", 64).atol


@pytest.mark.parametrize(
    ("target", "count"),
    [
        ("freetoken.builtin.attention_torch:SPEC", 1),
        ("freetoken.builtin.attention_torch:freetoken_attention_backends", 1),
        ("freetoken.builtin.kernels_torch:freetoken_kernels", len(OPS)),
    ],
)
def test_a_target_names_one_or_several_specs(target: str, count: int) -> None:
    """Oracle: the modules themselves."""
    assert len(load_specs(target)) == count
