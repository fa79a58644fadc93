"""The second decision: what the weights really left may shrink the plan, never grow it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from freetoken.memory.broker import DEVICE, claims_on, needed_bytes, steady_bytes
from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.plan import Plan, Sizing
from freetoken.vocab.units import ceil_div, format_bytes

MIN_CHUNK_TOKENS = 256  # below this a prefill step costs more in launches than it saves in memory


def size_after_measure(
    plan: Plan, free_bytes: int, *, kv_token_bytes: int | None = None, state_slot_bytes: int | None = None,
    step_peak_bytes: int | None = None, reserve_bytes: int = 0,
) -> Sizing:  # fmt: skip
    """The sizing for ``free_bytes`` of free device memory, weights loaded and pools not yet allocated.

    ``kv_token_bytes`` and ``state_slot_bytes`` are the model's unless given. ``step_peak_bytes`` is what the largest
    step takes while it runs: measured, or by default as the plan's claims declare it. ``reserve_bytes`` is left alone
    (graphs to come, say). What is already taken counts against ``plan.memory_bytes``.

    ``kv_pages`` are the pages of the pool, the scratch page among them. To fit, in this order: fewer KV pages, down to
    one request of full length; fewer snapshots; a smaller chunk, with a peak in proportion; fewer running requests in
    models with recurrent state; at last a shorter longest request. Raises ``RefusedPlan`` when not one page fits.
    """
    planned = Sizing.of(plan)
    budget = _budget(plan, free_bytes, reserve_bytes)
    if step_peak_bytes is None:
        device_claims = claims_on(plan.claims, DEVICE, plan.device)
        step_peak_bytes = needed_bytes(device_claims) - steady_bytes(device_claims)
    cost = _Cost(
        page_bytes=planned.page_tokens * (plan.model.kv_token_bytes if kv_token_bytes is None else kv_token_bytes),
        slot_bytes=plan.model.state_slot_bytes if state_slot_bytes is None else state_slot_bytes,
        peak_bytes=step_peak_bytes,
        planned_chunk_tokens=planned.max_prefill_tokens,
    )
    if cost.of(planned) <= budget:
        fact = f"{format_bytes(cost.of(planned))} of {format_bytes(budget)} left"
        return evolve(planned, because=(f"as planned: {fact}",))
    floor_pages = min(planned.kv_pages, 1 + ceil_div(plan.max_seq_tokens, planned.page_tokens))
    sizing = evolve(planned, because=())
    for shrink in (_fewer_snapshots, _smaller_chunk, _fewer_requests):
        if cost.of(sizing, floor_pages) <= budget:
            break
        sizing = shrink(sizing, lambda s: cost.of(s, floor_pages) <= budget)
    return _fewer_pages(sizing, cost, budget, floor_pages)


@frozen
class _Cost:
    """What a sizing takes on the device."""

    page_bytes: int
    slot_bytes: int
    peak_bytes: int
    planned_chunk_tokens: int

    def of(self, sizing: Sizing, kv_pages: int | None = None) -> int:
        pages = sizing.kv_pages if kv_pages is None else kv_pages
        rows = 1 + sizing.state_slots + sizing.snapshot_slots if self.slot_bytes else 0
        peak = ceil_div(self.peak_bytes * sizing.max_prefill_tokens, self.planned_chunk_tokens)
        return pages * self.page_bytes + rows * self.slot_bytes + peak


Fits = Callable[[Sizing], bool]


def _budget(plan: Plan, free_bytes: int, reserve_bytes: int) -> int:
    """What pools and steps may take: what is free, within what FreeToken may take in all."""
    taken = max(0, plan.device.memory_free_bytes - free_bytes)
    return min(free_bytes, plan.memory_bytes - taken) - reserve_bytes


def _fewer_snapshots(sizing: Sizing, fits: Fits) -> Sizing:
    if not sizing.snapshot_slots:
        return sizing
    slots = next((n for n in range(sizing.snapshot_slots, -1, -1) if fits(evolve(sizing, snapshot_slots=n))), 0)
    return sizing.shrunk(
        f"snapshots {sizing.snapshot_slots} → {slots}: KV for one request comes first", snapshot_slots=slots
    )


def _smaller_chunk(sizing: Sizing, fits: Fits) -> Sizing:
    tokens = sizing.max_prefill_tokens
    while tokens >= 2 * MIN_CHUNK_TOKENS and not fits(evolve(sizing, max_prefill_tokens=tokens)):
        tokens //= 2
    if tokens == sizing.max_prefill_tokens:
        return sizing
    return sizing.shrunk(
        f"largest chunk {sizing.max_prefill_tokens} → {tokens} tokens: a step's peak is in proportion to it",
        max_prefill_tokens=tokens,
    )


def _fewer_requests(sizing: Sizing, fits: Fits) -> Sizing:
    if sizing.state_slots <= 1:
        return sizing
    slots = next((n for n in range(sizing.state_slots, 0, -1) if fits(evolve(sizing, state_slots=n))), 1)
    running = min(sizing.max_running_requests, slots)
    return sizing.shrunk(
        f"running requests {sizing.max_running_requests} → {running}: each keeps a recurrent state",
        state_slots=slots, max_running_requests=running,
    )  # fmt: skip


def _fewer_pages(sizing: Sizing, cost: _Cost, budget: int, floor_pages: int) -> Sizing:
    left = budget - cost.of(sizing, 0)
    pages = min(sizing.kv_pages, left // cost.page_bytes) if cost.page_bytes else sizing.kv_pages
    if left < 0 or pages < 2:
        raise RefusedPlan(
            "room for the KV cache",
            f"{format_bytes(max(budget, 0))} are left after loading; one page of KV and the scratch page beside a step "
            f"take {format_bytes(cost.of(sizing, 2))}",
            "lower --max-prefill-tokens, raise --memory-ratio, or free memory that other programs hold",
        )
    why = f"KV {sizing.kv_tokens} → {pages * sizing.page_tokens} tokens: {format_bytes(budget)} left after loading"
    if pages < floor_pages:
        longest = (pages - 1) * sizing.page_tokens
        why += f"; requests of more than {longest} tokens will be refused"
    if pages == sizing.kv_pages:
        return sizing
    return sizing.shrunk(why, kv_pages=pages)
