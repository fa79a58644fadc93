"""Wrappers are lent to live plans. Oracle: which wrapper a plan holds, against fences that a test sets by hand."""

import gc

from freetoken_attention_flashinfer.leases import Lease, LeasePool


class HandFence:
    def __init__(self) -> None:
        self.open = True

    def set(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open

    def wait(self) -> None:
        self.open = True


class Plan:
    def __init__(self, pool: LeasePool) -> None:
        self.lease = pool.take()
        self.lease.fence.set()
        pool.lend(self.lease, self)


def make_pool() -> LeasePool:
    return LeasePool(lambda: Lease(object(), HandFence()))


def test_live_plans_hold_different_wrappers() -> None:
    pool = make_pool()
    plans = [Plan(pool) for _ in range(5)]
    assert len({id(plan.lease.wrapper) for plan in plans}) == 5


def test_a_dropped_plans_wrapper_is_lent_anew_once_the_device_has_read_it() -> None:
    pool = make_pool()
    first = Plan(pool)
    lease = first.lease
    del first
    gc.collect()
    while_in_flight = Plan(pool)
    assert while_in_flight.lease is not lease
    lease.fence.wait()
    assert Plan(pool).lease is lease


def test_a_fence_that_is_closed_does_not_hide_one_that_is_open() -> None:
    pool = make_pool()
    plans = [Plan(pool), Plan(pool)]
    closed, opened = (plan.lease for plan in plans)
    plans.clear()
    gc.collect()
    opened.fence.wait()
    assert pool.take() is opened
    assert pool.take() not in (closed, opened)
