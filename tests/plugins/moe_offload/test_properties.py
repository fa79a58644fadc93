"""What holds for every sequence of steps. Oracles: the tables against each other, and the experts' own numbers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.testing.fakes import make_batch
from freetoken.testing.moe import dense_sum
from freetoken_moe_offload.cache import DECODE, PREFILL

LAYERS, EXPERTS, TOP_K = 3, 6, 2

steps = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.sampled_from([DECODE, PREFILL]),
        st.lists(
            st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True), min_size=1, max_size=5
        ),
    ),
    min_size=1,
    max_size=12,
)
common = settings(max_examples=40, deadline=None)


@common
@given(steps, st.integers(TOP_K, LAYERS * EXPERTS), st.sampled_from(["lru", "lfu-decay"]))
def test_no_slot_is_owned_twice_and_each_holds_its_owner(filled: Any, steps: Any, slots: int, policy: str) -> None:
    """After every step: the tables agree, every slot holds bit for bit the expert it is said to hold, and the result is
    the sum over all experts in float64."""
    strategy = filled(LAYERS, EXPERTS, TOP_K, slots=slots, policy=policy)
    (cache,) = strategy._caches
    for number, (layer, cause, rows) in enumerate(steps):
        tokens = len(rows)
        lens = ((1,) * tokens, (1,) * tokens) if cause == DECODE else ((tokens + 1,), (0,))
        hidden = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(number))
        weights = torch.full((tokens, TOP_K), 0.5)
        experts = torch.tensor(rows, dtype=torch.int32)
        strategy.begin_step(make_batch(*lens))
        out = strategy.finish(strategy.start(layer, hidden, weights, experts.clone()))
        strategy.end_step()
        for slot, owner in enumerate(cache.owners()):
            if owner >= 0:
                host = cache.hosts[owner // EXPERTS].parts
                assert all(torch.equal(cache.bank[name][slot], host[name][owner % EXPERTS]) for name in host)
        parts = cache.hosts[layer].parts
        packed = [{name: parts[name][expert] for name in parts} for expert in range(EXPERTS)]
        torch.testing.assert_close(out.double(), dense_sum(hidden, weights, experts, packed), rtol=1e-4, atol=1e-5)


@common
@given(steps, st.integers(EXPERTS, LAYERS * EXPERTS))
def test_a_look_up_moves_what_it_misses_and_keeps_what_it_hits(filled: Any, steps: Any, slots: int) -> None:
    """Oracle: the owners before the step. Exactly the wanted experts that lay nowhere are counted as moved."""
    strategy = filled(LAYERS, EXPERTS, TOP_K, slots=slots)
    (cache,) = strategy._caches
    for layer, cause, rows in steps:
        before = {owner: slot for slot, owner in enumerate(cache.owners()) if owner >= 0}
        wanted = {layer * EXPERTS + expert for row in rows for expert in row}
        misses = strategy.stats().misses
        cache.bring(layer, torch.tensor(rows, dtype=torch.int32), cause)
        after = {owner: slot for slot, owner in enumerate(cache.owners()) if owner >= 0}
        assert wanted <= after.keys()
        assert all(after[number] == before[number] for number in wanted & before.keys())
        assert strategy.stats().misses - misses == len(wanted - before.keys())


@common
@given(st.lists(steps, min_size=2, max_size=4), st.integers(0, LAYERS - 1), st.integers(EXPERTS, 2 * EXPERTS))
def test_the_chunks_of_a_layer_bring_each_expert_once(filled: Any, chunks: Any, layer: int, slots: int) -> None:
    """Oracle: the set of experts that the chunks are routed to together, from as many slots as a layer has experts."""
    strategy = filled(LAYERS, EXPERTS, TOP_K, slots=slots)
    (cache,) = strategy._caches
    wanted = set()
    for steps_of_chunk in chunks:
        for _, _, rows in steps_of_chunk:
            wanted |= {expert for row in rows for expert in row}
            cache.bring(layer, torch.tensor(rows, dtype=torch.int32), PREFILL)
    assert cache.counts()["prefill_misses"] <= len(wanted)


def test_a_long_prompt_spares_what_decode_uses(filled: Any) -> None:
    """Oracle: the decode steps' own experts are hits again after a prompt has gone through all layers."""
    strategy = filled(LAYERS, EXPERTS, TOP_K, slots=LAYERS * TOP_K + EXPERTS)
    (cache,) = strategy._caches
    liked = torch.tensor([[0, 5]], dtype=torch.int32)
    for _ in range(3):
        for row in range(LAYERS):
            cache.bring(row, liked, DECODE)
    every = torch.arange(EXPERTS, dtype=torch.int32).view(-1, TOP_K)
    for row in range(LAYERS):
        cache.bring(row, every, PREFILL)
    misses = cache.counts()["decode_misses"]
    for row in range(LAYERS):
        cache.bring(row, liked, DECODE)
    assert cache.counts()["decode_misses"] == misses


def test_the_policies_differ_where_they_should(filled: Any) -> None:
    """Oracle: worked out by hand. Expert 0 is used often, then 1 and 2 once each; 3 needs a slot of the three."""
    gone = {}
    for policy in ("lru", "lfu-decay"):
        strategy = filled(1, EXPERTS, 1, slots=3, policy=policy)
        (cache,) = strategy._caches
        for expert in (0, 0, 0, 0, 1, 2, 3):
            cache.bring(0, torch.tensor([[expert]], dtype=torch.int32), DECODE)
        gone[policy] = {0, 1, 2} - set(cache.owners())
    assert gone == {"lru": {0}, "lfu-decay": {1}}
