"""The claims cover what the library asks for. Oracle: its planner, worked out a second time in ``conftest.py``."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.plugin.protocols import AttentionLimits, AttentionSetup
from freetoken.testing.launches import DEVICES
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.model_spec import AttentionGroup
from freetoken_attention_flashinfer.spec import SPEC
from freetoken_attention_flashinfer.workspace import Sizes, captured_sizes, most_tokens, shared_float_bytes

HEADS = st.sampled_from(((32, 4), (16, 2), (8, 8), (9, 3), (64, 1), (8, 1), (96, 1)))
DIMS = st.sampled_from((64, 128, 256))
LENS = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 40_000)), min_size=1, max_size=40)


@given(LENS, HEADS, DIMS, st.sampled_from((1, 16, 64)))
def test_any_step_fits(needed, lens, heads, dim, page) -> None:
    sizes = Sizes(*heads, dim, 132)
    query_lens = [q for q, _ in lens]
    pages = [-(-(q + p) // page) for q, p in lens]
    floats, ints = needed(query_lens, pages, *heads, dim, page, graph=False)
    assert floats <= sizes.float_bytes()
    assert ints <= sizes.int_bytes(sum(query_lens), len(query_lens))


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=40), HEADS, DIMS)
def test_any_step_fits_with_hopper_kernels(query_lens, heads, dim) -> None:
    """Oracle: its planner has an entry in each of seven arrays for every tile of every head, and one for each block."""
    tiles = sum(-(-length // (192 if dim == 64 else 128)) for length in query_lens)
    needed = 7 * (-(-4 * heads[0] * tiles // 16) * 16) + -(-4 * 133 // 16) * 16
    assert needed <= Sizes(*heads, dim, 132).int_bytes(sum(query_lens), len(query_lens))


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=200), HEADS, DIMS)
def test_any_replay_fits(needed, prefixes, heads, dim) -> None:
    sizes = Sizes(*heads, dim, 132)
    pages = [p // 16 + 1 for p in prefixes]
    floats, ints = needed([1] * len(prefixes), pages, *heads, dim, 16, graph=True)
    assert floats <= sizes.captured_float_bytes(len(prefixes))
    assert ints <= sizes.captured_int_bytes(len(prefixes))


@given(HEADS, DIMS, st.integers(1, 300), st.integers(1, 9000))
def test_more_never_needs_less(heads, dim, sequences, tokens) -> None:
    """A pool made for the limits serves every step within them."""
    sizes = Sizes(*heads, dim, 132)
    assert sizes.int_bytes(tokens, sequences) <= sizes.int_bytes(tokens + 100, sequences + 1)
    assert sizes.captured_int_bytes(sequences) <= sizes.captured_int_bytes(sequences + 1)
    assert sizes.captured_float_bytes(sequences) <= sizes.captured_float_bytes(sequences + 1)


def test_the_figure_in_the_readme() -> None:
    limits = AttentionLimits(16, 131_072, 64, 8192)
    assert round(shared_float_bytes(Sizes(32, 4, 128, 132), limits) / 1e6) == 139
    assert most_tokens(limits) == 8256


@pytest.mark.parametrize("most", [1, 8, 9, 16, 100, 256, 1000])
def test_captured_sizes_are_counted_high_enough(most: int) -> None:
    """Oracle: the engine's own list."""
    from freetoken.run.graph_sizes import graph_sizes

    assert len(graph_sizes(most)) <= captured_sizes(most) <= len(graph_sizes(most)) + 4


def test_the_claim_covers_what_is_taken(library) -> None:
    """Oracle: the bytes of the backend's own tensors, after a step and with every size captured."""
    from freetoken.run.graph_sizes import graph_sizes
    from freetoken.testing.fakes import make_batch
    from freetoken.vocab.hardware import Device

    limits = AttentionLimits(16, 512, 12, 64)
    group = AttentionGroup("g", (0,), 8, PagedKV(2, 64, 64, "float16"), 0.125)
    setup = AttentionSetup(group, Device(), "float16", limits)
    parts, captured, steps, _ = SPEC.workspace(setup)
    backend = SPEC.create(setup)
    plans = [backend.plan(make_batch((60, 1, 1, 1), (0, 9, 30, 400))) for _ in range(8)]
    assert backend._floats.numel() == parts.steady_bytes
    assert sum(plan.wrapper.ints.numel() for plan in plans) <= steps.steady_bytes
    backend.reserve_graph(limits)
    kept = [backend.plan_capture(make_batch((1,) * n, (5,) * n)) for n in graph_sizes(12)]
    memory = backend._graph
    tensors = (memory.page_ids, memory.query_starts, memory.page_starts, memory.last_page_tokens, memory.ints)
    taken = sum(t.numel() * t.element_size() for t in tensors)
    wrappers = sum(len(plan.ring) for plan in kept) * 32_768 * 4
    assert taken + wrappers <= captured.steady_bytes <= 2 * (taken + wrappers)


@pytest.mark.parametrize("card", sorted(DEVICES))
def test_claims_are_for_every_card(card: str) -> None:
    group = AttentionGroup("g", (0,), 32, PagedKV(4, 128, 128, "bfloat16"), 0.1)
    limits = AttentionLimits(16, 40_960, 64, 8192)
    claims = SPEC.workspace(AttentionSetup(group, DEVICES[card], "bfloat16", limits))
    assert {claim.where for claim in claims} == {"device", "host"}
    assert 50e6 < sum(c.worst_bytes for c in claims if c.where == "device") < 300e6
