"""The allocator's limit under a cap. Oracle: the sum of all that is taken, written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.config.engine_options import CoreOptions
from freetoken.memory.allocator import CAPPED, LATER_BYTES, allocator_limit_bytes, is_capped
from freetoken.memory.sizing import size_after_measure
from freetoken.models import llama
from freetoken.testing.plans import planned
from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.hardware import Device
from freetoken.vocab.plan import Plan
from freetoken.vocab.units import GIB, MIB

CARD = Device("cuda", 0, "card", (9, 0), 132, 232_448, 24 * GIB, 23 * GIB)


def plan_of(**options: object) -> Plan:
    return planned(llama.FAMILY.tiny(), CARD, options=CoreOptions(max_seq_len=64, **options)).plan  # type: ignore[arg-type]


def test_only_a_cap_that_binds_is_held() -> None:
    """Oracle: the options. A cap above what is free is none, and a CPU has no allocator to hold."""
    assert is_capped(plan_of(device_memory_bytes=4 * GIB))
    assert not is_capped(plan_of())
    assert not is_capped(plan_of(device_memory_bytes=40 * GIB))
    assert not is_capped(planned(llama.FAMILY.tiny(), options=CoreOptions(device_memory_bytes=GIB)).plan)


@given(st.integers(0, 900), st.integers(0, 3000))
def test_all_that_is_taken_stays_within_the_cap(context_mib: int, reserved_mib: int) -> None:
    """Oracle: context + what the allocator may hold + what comes later = the cap. And what sizing gives to pools and a
    step, after the same measurement, is within the allocator's limit, whatever part of its memory is idle."""
    plan = plan_of(device_memory_bytes=4 * GIB)
    context, reserved = context_mib * MIB, reserved_mib * MIB
    free = CARD.memory_free_bytes - context - reserved
    if context + reserved + LATER_BYTES > 4 * GIB:
        with pytest.raises(RefusedPlan, match=CAPPED):
            allocator_limit_bytes(plan, free, reserved)
        return
    limit = allocator_limit_bytes(plan, free, reserved)
    assert context + limit + LATER_BYTES == 4 * GIB
    idle = reserved // 3
    try:
        sizing = size_after_measure(plan, free + idle, step_peak_bytes=5 * MIB, reserve_bytes=LATER_BYTES)
    except RefusedPlan:
        return
    pools = sizing.kv_pages * sizing.page_tokens * plan.model.kv_token_bytes
    assert (reserved - idle) + pools + 5 * MIB <= limit


def test_under_a_cap_the_context_is_counted_in_full() -> None:
    """Oracle: the claim, which without a cap is smaller."""
    claims = {cap: plan_of(device_memory_bytes=cap).claims[0].steady_bytes for cap in (None, 4 * GIB)}
    assert claims[4 * GIB] == 640 * MIB + LATER_BYTES
    assert claims[None] == 300 * MIB
