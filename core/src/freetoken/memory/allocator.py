"""Keeps torch's allocator of device memory within a cap, so that what it keeps for reuse never exceeds it either."""

from __future__ import annotations

from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.plan import Plan
from freetoken.vocab.units import MIB, format_bytes

CAPPED = "--device-memory-bytes"
"""The reason of a plan's memory that is a cap, and not a share of what is free."""

LATER_BYTES = 192 * MIB
"""What is taken outside the allocator once the caches are there: captured steps, modules loaded late, work spaces."""


def is_capped(plan: Plan) -> bool:
    """Whether the user gave the bytes that may be taken, and they are fewer than there are."""
    if plan.device.kind == "cpu":
        return False
    return any(decision.name == "memory_bytes" and decision.because == CAPPED for decision in plan.decisions)


def allocator_limit_bytes(plan: Plan, free_bytes: int, reserved_bytes: int) -> int:
    """What the allocator may hold in all, so that the process stays within ``plan.memory_bytes``.

    ``free_bytes`` are the driver's now, and ``reserved_bytes`` the allocator's: what else has gone since the plan was
    made is the context and its modules. Raises ``RefusedPlan`` when those alone are too much.
    """
    outside = max(0, plan.device.memory_free_bytes - free_bytes - reserved_bytes)
    limit = plan.memory_bytes - outside - LATER_BYTES
    if limit < reserved_bytes:
        raise RefusedPlan(
            f"{CAPPED} {plan.memory_bytes}",
            f"{format_bytes(reserved_bytes)} of weights and {format_bytes(outside)} of the device's context leave"
            f" nothing, {format_bytes(LATER_BYTES)} being kept for captured steps",
            "raise it, or lower --moe-offload-memory-bytes where experts are offloaded",
        )
    return limit


def hold_allocator(plan: Plan) -> None:
    """From here on torch gives back what it keeps, and in the end refuses, before it takes more than the cap leaves."""
    if not is_capped(plan):
        return
    import torch

    index = plan.device.index
    free, total = torch.cuda.mem_get_info(index)
    limit = allocator_limit_bytes(plan, free, torch.cuda.memory_reserved(index))
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)
