"""Wrappers that are lent to plans: one a live plan, back when the plan is dropped, lent anew once nobody reads them.

A wrapper's plan lies in pinned host memory until the device has copied it. A step may be in flight while the next is
planned, so a wrapper must not be planned again before that copy is done: a fence tells.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from attrs import define, field


class Fence(Protocol):
    """Set after the device was given work that reads host memory; passed when it has done so."""

    def set(self) -> None: ...

    def passed(self) -> bool: ...

    def wait(self) -> None: ...


class DeviceFence:
    """A CUDA event on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def set(self) -> None:
        self._event.record()

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class NoFence:
    """On a CPU everything is done when it returns."""

    def set(self) -> None:
        """Nothing is in flight."""

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is in flight."""


def make_fence(device: torch.device) -> Fence:
    return DeviceFence() if device.type == "cuda" else NoFence()


@define(eq=False)
class Lease:
    """A wrapper and the fence behind its newest plan."""

    wrapper: Any
    fence: Fence


@define(eq=False)
class LeasePool:
    """Leases that nobody holds. ``make`` is asked for another when none of them is free of the device."""

    make: Callable[[], Lease]
    _free: deque[Lease] = field(factory=deque)

    def take(self) -> Lease:
        """A lease whose wrapper may be planned."""
        for _ in range(len(self._free)):
            lease = self._free.popleft()
            if lease.fence.passed():
                return lease
            self._free.append(lease)
        return self.make()

    def lend(self, lease: Lease, plan: object) -> None:
        """``lease`` is ``plan``'s, and comes back when the plan is dropped."""
        weakref.finalize(plan, self._free.append, lease).atexit = False
