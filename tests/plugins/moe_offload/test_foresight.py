"""Fetching the next layer's experts while this one computes: what is fetched, when, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken import SamplingParams
from freetoken.testing.fakes import make_batch
from freetoken.testing.moe import dense_sum
from freetoken_moe_offload.cache import DECODE, PREFILL
from freetoken_moe_offload.foresight import LEAST_PAIRS, LONGEST_PAUSE, Trust, likely, room_ahead

LAYERS, EXPERTS, TOP_K = 4, 8, 2
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


# ------------------------------------------------------------------------------------------------ arithmetic


def test_only_what_is_all_but_sure_is_worth_fetching() -> None:
    """Oracle: worked out by hand. The mean is 300 pairs, so an expert of fewer than 38 may go unused."""
    assert likely([600, 37, 38, 525]) == [0, 3, 2]
    assert likely([LEAST_PAIRS - 1, LEAST_PAIRS, 0, 0]) == [1]
    assert likely([3, 3, 3, 3]) == []
    assert likely([]) == []


@pytest.mark.parametrize(("slots", "experts", "room"), [(256, 128, 32), (130, 128, 2), (128, 128, 0), (9, 128, 0)])
def test_decode_keeps_seven_eighths_of_the_slots(slots: int, experts: int, room: int) -> None:
    """Oracle: an eighth of the slots, and no more than are left beside a whole layer."""
    assert room_ahead(slots, experts) == room


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=300))
def test_waste_ends_foresight_for_ever_longer(outcomes: list[tuple[int, int]]) -> None:
    """Property: with nothing wasted it is always allowed; where all is wasted, at most one layer in eight is tried at
    first, and the pauses double up to their limit."""
    trust, allowed = Trust(), 0
    for useful, _ in outcomes:
        allowed += trust.ask()
        trust.learn(useful, 0)
    assert allowed == len(outcomes)
    trust, tried = Trust(), []
    for layer in range(len(outcomes)):
        if trust.ask():
            tried.append(layer)
            trust.learn(0, 3)
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps == [min(8 * 2**n, LONGEST_PAUSE) + 1 for n in range(len(gaps))]


def test_a_little_waste_is_borne() -> None:
    """Oracle: one of fifty is within five percent; five of ten are not."""
    trust = Trust()
    trust.learn(50, 1)
    assert trust.ask()
    trust.learn(5, 5)
    assert not trust.ask()


# ------------------------------------------------------------------------------------------------ one strategy


def chunk(strategy: Any, layer: int, rows: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(len(rows), 8, generator=torch.Generator().manual_seed(layer))
    weights = torch.full(rows.shape, 0.5)
    return strategy.start(layer, hidden, weights, rows.clone()), hidden, weights


def every(tokens: int, experts: list[int]) -> torch.Tensor:
    """``[tokens, 2] i32``: the experts of a list in turn."""
    flat = [experts[i % len(experts)] for i in range(2 * tokens)]
    return torch.tensor(flat, dtype=torch.int32).view(-1, 2)


def test_a_hint_moves_experts_before_they_are_asked_for_and_spares_the_layer_at_hand(filled: Any) -> None:
    """Oracle: the owners of the slots, the counters, and the sum in float64 over the layer that was open meanwhile."""
    strategy = filled(LAYERS, EXPERTS, TOP_K, slots=20)
    (cache,) = strategy._caches
    strategy.begin_step(make_batch((200,), (0,)))
    pending, hidden, weights = chunk(strategy, 1, every(200, [0, 1, 2, 3, 4, 5, 6, 7]))
    before = strategy.stats()
    assert strategy.foresees
    strategy.hint(2, every(200, [7, 6]))
    owned = set(cache.owners())
    assert {2 * EXPERTS + 7, 2 * EXPERTS + 6} <= owned
    assert {EXPERTS + e for e in range(EXPERTS)} <= owned, "the open layer lost a slot"
    out = strategy.finish(pending)
    packed = [{name: part[e] for name, part in cache.hosts[1].parts.items()} for e in range(EXPERTS)]
    expected = dense_sum(hidden, weights, every(200, list(range(EXPERTS))), packed)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert strategy.stats().moved_bytes["hint"] == 2 * cache.group.expert_bytes
    strategy.finish(chunk(strategy, 2, every(200, [7, 6]))[0])
    strategy.end_step()
    after = strategy.stats()
    assert (after.misses - before.misses, after.hits - before.hits, after.wasted_bytes) == (0, 2, 0)


def test_what_nobody_wanted_is_counted_and_remembered(filled: Any) -> None:
    """Oracle: the experts of the hint that the layer was not routed to, in bytes; then none is wanted for a while."""
    strategy = filled(LAYERS, EXPERTS, TOP_K, slots=20)
    (cache,) = strategy._caches
    strategy.begin_step(make_batch((200,), (0,)))
    strategy.finish(chunk(strategy, 1, every(200, [0, 1]))[0])
    strategy.hint(2, every(200, [7, 6]))
    strategy.finish(chunk(strategy, 2, every(200, [7, 0]))[0])
    strategy.end_step()
    assert strategy.stats().wasted_bytes == cache.group.expert_bytes
    assert not strategy.foresees


@pytest.mark.parametrize("cause", [DECODE, PREFILL])
def test_no_hint_is_followed_where_it_could_do_harm(filled: Any, cause: int) -> None:
    """Oracle: the bytes moved. Not in a decode step, not of the layer at hand, not in a rehearsal, not without room."""
    for slots, layer, rehearsing in ((20, 2, cause == PREFILL), (20, 1, False), (EXPERTS, 2, False)):
        strategy = filled(LAYERS, EXPERTS, TOP_K, slots=slots)
        strategy.begin_step(make_batch(*(((1, 1), (1, 1)) if cause == DECODE else ((200,), (0,)))))
        strategy.start(1, torch.zeros(1, 8), torch.ones(1, 2), torch.tensor([[0, 1]], dtype=torch.int32))
        if rehearsing:
            with strategy.rehearse():
                strategy.hint(layer, every(200, [7, 6]))
        else:
            strategy.hint(layer, every(200, [7, 6]))
        assert strategy.stats().moved_bytes["hint"] == 0


steps = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.booleans(),
        st.lists(st.integers(0, EXPERTS - 1), min_size=2, max_size=8, unique=True),
        st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4, unique=True),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(steps, st.integers(EXPERTS, LAYERS * EXPERTS))
def test_slots_hold_their_owners_whatever_is_foreseen(filled: Any, sequence: Any, slots: int) -> None:
    """Property: after layers with right and wrong hints, decodes between them, every slot holds bit for bit the expert
    that the tables say, no expert has two slots, and each layer's result is the sum in float64."""
    strategy = filled(LAYERS, EXPERTS, TOP_K, slots=slots)
    (cache,) = strategy._caches
    strategy.begin_step(make_batch((100,), (0,)))
    for layer, decode, experts, foreseen in sequence:
        rows = every(40, experts)
        pending, hidden, weights = chunk(strategy, layer, rows)
        strategy.hint((layer + 1) % LAYERS, every(64, foreseen))
        out = strategy.finish(pending)
        packed = [{name: part[e] for name, part in cache.hosts[layer].parts.items()} for e in range(EXPERTS)]
        torch.testing.assert_close(out.double(), dense_sum(hidden, weights, rows, packed), rtol=1e-4, atol=1e-5)
        if decode:
            strategy.begin_step(make_batch((1,), (1,)))
            strategy.finish(chunk(strategy, (layer + 2) % LAYERS, every(1, experts))[0])
            strategy.end_step()
        for slot, owner in enumerate(cache.owners()):
            if owner >= 0:
                host = cache.hosts[owner // EXPERTS].parts
                assert all(torch.equal(cache.bank[name][slot], host[name][owner % EXPERTS]) for name in host)
    strategy.end_step()
    stats = strategy.stats()
    assert 0 <= stats.wasted_bytes <= stats.moved_bytes["hint"]


# ------------------------------------------------------------------------------------------------ whole engines


def test_windows_foresee_and_answer_as_resident(
    open_llm: Callable[..., Any], prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Oracle: the tokens of ``resident``. With foresight bytes come on hints, without it none do; nor where a model is
    all in the two layers that a hint must spare."""
    moved = {}
    for foresee in (True, False):
        with open_llm("offload", slots=20, foresee=foresee) as llm:
            strategy = llm.running.built.moe
            assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [tokens[:4] for tokens in expected]
            moved[foresee] = strategy.stats().moved_bytes["hint"]
            layers = len(llm.running.built.engine.runner.model.layers)
    assert (moved[True] > 0) == (layers > 2)
    assert moved[False] == 0
