"""Targets. Oracle: the cards' published figures, and what a kernel's bucket rules read."""

from __future__ import annotations

import pytest

from freetoken.testing.launches import DEVICES
from freetoken.vocab.errors import UsageError
from freetoken.warmup.targets import describe_target, parse_target, target_names


@pytest.mark.parametrize("name", sorted(set(DEVICES) & set(target_names())))
def test_named_cards_are_those_that_kernels_are_tested_on(name: str) -> None:
    ours, theirs = parse_target(name), DEVICES[name]
    assert (ours.arch, ours.multiprocessors) == (theirs.arch, theirs.multiprocessors)
    assert ours.shared_memory_bytes == theirs.shared_memory_bytes


def test_a_card_by_its_numbers_is_the_named_one() -> None:
    given, named = parse_target("cuda:90,sms=132"), parse_target("H200")
    assert (given.arch, given.multiprocessors, given.shared_memory_bytes) == (90, 132, named.shared_memory_bytes)
    assert parse_target("cuda:120,sms=84,memory=16GiB").memory_total_bytes == 16 * 2**30
    assert parse_target("cuda:90,sms=132,shared=99KiB").shared_memory_bytes == 99 * 1024
    assert "132 multiprocessors" in describe_target(given)


@pytest.mark.parametrize(
    "text", ["h900", "cuda:90", "cuda:90,sms=many", "cuda:90,sms=132,cores=3", "cuda:90,sms=0", "rocm:90"]
)
def test_anything_else_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_target(text)
    assert "--target cuda:90,sms=132" in str(refused.value)
