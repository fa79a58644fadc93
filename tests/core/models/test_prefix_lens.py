"""Cached tokens of each sequence are counted once a pass, and never left over from a pass before."""

from __future__ import annotations

from freetoken.models.gated_delta_block import PrefixLens
from freetoken.testing.fakes import make_batch


def test_layers_of_a_pass_share_one_count() -> None:
    """By hand: lengths of two sequences; the very tensor is shared."""
    batch, prefixes = make_batch((3, 1), (0, 7)), PrefixLens()
    prefixes.begin(batch)
    assert prefixes.of(batch).tolist() == [0, 7]
    assert prefixes.of(batch) is prefixes.of(batch)


def test_another_batch_is_counted_by_itself() -> None:
    """Chunks of a prompt pass a layer one after another: the last one embedded is not what the first one needs."""
    first, second, prefixes = make_batch((4,), (0,)), make_batch((4,), (4,)), PrefixLens()
    prefixes.begin(first)
    prefixes.begin(second)
    assert prefixes.of(first).tolist() == [0]
    assert prefixes.of(second).tolist() == [4]


def test_a_new_pass_over_the_same_batch_counts_anew() -> None:
    """A captured pass: the batch's tensors are overwritten in place for each replay."""
    batch, prefixes = make_batch((1, 1), (5, 6)), PrefixLens()
    prefixes.begin(batch)
    batch.context_lens.add_(10)
    prefixes.begin(batch)
    assert prefixes.of(batch).tolist() == [15, 16]
