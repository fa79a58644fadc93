"""The sizing after the measurement. Oracle: hypothesis; whatever is free, the result fits and nothing has grown."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from freetoken.memory.sizing import size_after_measure
from freetoken.vocab.cache_spec import PagedKV, RecurrentState
from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.hardware import Device, Hardware
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.model_spec import ModelSpec
from freetoken.vocab.plan import Choice, Plan, Sizing
from freetoken.vocab.units import KIB, MIB

KV = PagedKV(heads=2, k_dim=128, v_dim=128, dtype="bfloat16")  # 1 KiB a token
STATE = RecurrentState(shapes=((256, 1024),))  # 1 MiB a sequence
CHOICE = Choice("", "", "", "")
DEVICE = Device(kind="cuda", memory_total_bytes=100 * MIB, memory_free_bytes=100 * MIB)


def make_plan(*, hybrid: bool = False, peak_bytes: int = 4 * MIB, **changes) -> Plan:
    model = ModelSpec(
        family="f", architecture="a", num_layers=2, hidden=8, vocab_size=9, max_context_tokens=4096,
        caches=(KV, STATE) if hybrid else (KV,), attention=(), parameters=1,
    )  # fmt: skip
    values = {
        "model": model, "model_path": "m", "served_name": "m", "hardware": Hardware(), "device": DEVICE,
        "dtype": "bfloat16", "attention": (), "moe": CHOICE, "kernels": (), "warmup": CHOICE, "page_tokens": 16,
        "max_seq_tokens": 1024, "max_running_requests": 8, "max_prefill_tokens": 2048, "kv_tokens": 16 * KIB,
        "state_slots": 8 if hybrid else 0, "snapshot_bytes": 6 * MIB if hybrid else 0, "memory_bytes": 90 * MIB,
        "claims": (MemoryClaim("step", "activations", 0, peak_bytes),), "decisions": (), "options": (),
    }  # fmt: skip
    return Plan(**values | changes)


def taken_bytes(plan: Plan, sizing: Sizing, peak_bytes: int) -> int:
    """What pools and the largest step of ``sizing`` take, written out."""
    kv = sizing.kv_pages * sizing.page_tokens * plan.model.kv_token_bytes
    rows = 1 + sizing.state_slots + sizing.snapshot_slots
    peak = peak_bytes * sizing.max_prefill_tokens / plan.max_prefill_tokens
    return kv + rows * plan.model.state_slot_bytes + peak


@given(
    hybrid=st.booleans(),
    free=st.integers(0, 100 * MIB),
    allowed=st.integers(0, 100 * MIB),
    peak=st.integers(0, 30 * MIB),
    reserve=st.integers(0, 5 * MIB),
)
def test_it_fits_what_is_free_and_never_grows(hybrid, free, allowed, peak, reserve):
    plan = make_plan(hybrid=hybrid, memory_bytes=allowed)
    planned = Sizing.of(plan)
    try:
        sizing = size_after_measure(plan, free, step_peak_bytes=peak, reserve_bytes=reserve)
    except RefusedPlan:
        sizing = None
    budget = min(free, allowed - (100 * MIB - free)) - reserve
    least = 2 * 16 * KIB + (2 * MIB if hybrid else 0) + peak / 8  # two pages, one slot, the smallest chunk
    if sizing is None:
        assert budget < least + 1
        return
    assert taken_bytes(plan, sizing, peak) <= budget
    for name in ("kv_pages", "max_prefill_tokens", "max_running_requests", "state_slots", "snapshot_slots"):
        assert getattr(sizing, name) <= getattr(planned, name)
    assert sizing.because
    if taken_bytes(plan, planned, peak) <= budget - 1:
        assert sizing.because[0].startswith("as planned")
        assert sizing.kv_pages == planned.kv_pages
    full = sizing.kv_pages == planned.kv_pages
    assert full or taken_bytes(plan, sizing, peak) + 16 * KIB > budget, "a page more would have fitted"


@given(st.integers(0, 100 * MIB), st.integers(0, 8 * MIB))
def test_more_free_memory_never_gives_a_smaller_cache(free, more):
    assume(free + more <= 100 * MIB)
    plan = make_plan(memory_bytes=100 * MIB)

    def pages(free_bytes: int) -> int:
        try:
            return size_after_measure(plan, free_bytes, step_peak_bytes=0).kv_pages
        except RefusedPlan:
            return 0

    assert pages(free + more) >= pages(free)


def test_all_that_was_planned_when_it_fits():
    sizing = size_after_measure(make_plan(), 95 * MIB)
    assert sizing.kv_tokens == 16 * KIB
    assert sizing.because == ("as planned: 20.0 MiB of 85.0 MiB left",)


def test_the_cache_shrinks_first_and_says_from_what_to_what():
    sizing = size_after_measure(make_plan(), 24 * MIB)  # 76 of the 90 allowed MiB are taken, 4 go to the step
    assert sizing.kv_tokens == 10 * KIB
    assert (sizing.max_prefill_tokens, sizing.max_running_requests) == (2048, 8)
    assert sizing.because == ("KV 16384 → 10240 tokens: 14.0 MiB left after loading",)


def test_then_snapshots_then_the_chunk_then_requests_then_the_longest_request():
    plan = make_plan(hybrid=True, memory_bytes=100 * MIB)
    # all of it takes 16 (KV) + 15 (rows) + 4 (step); one full request takes 1 MiB of KV and a page of scratch
    assert size_after_measure(plan, 36 * MIB).because[0].startswith("as planned")
    fewer = size_after_measure(plan, 17 * MIB)
    assert (fewer.snapshot_slots, fewer.max_prefill_tokens, fewer.state_slots) == (2, 2048, 8)
    chunk = size_after_measure(plan, 13 * MIB)
    assert (chunk.snapshot_slots, chunk.max_prefill_tokens, chunk.state_slots) == (0, 1024, 8)
    requests = size_after_measure(plan, 7 * MIB)
    assert (requests.max_prefill_tokens, requests.state_slots, requests.max_running_requests) == (256, 4, 4)
    longest = size_after_measure(plan, 3 * MIB)
    assert (longest.state_slots, longest.kv_pages) == (1, 32)
    assert longest.because[-1].endswith("requests of more than 496 tokens will be refused")
    with pytest.raises(RefusedPlan, match="room for the KV cache"):
        size_after_measure(plan, 2 * MIB)


def test_a_measured_peak_and_a_reserve_count():
    measured = size_after_measure(make_plan(), 24 * MIB, step_peak_bytes=2 * MIB, reserve_bytes=MIB)
    assert measured.kv_tokens == 11 * KIB
