"""Programmatic dependent launch: a kernel may start before the one in front of it has ended.

Between two dependent kernels of a captured step an H200 idles for 2.2 µs, longer than many of them run. From compute
capability 9.0 on a launch may carry an attribute that lets it start once every block of its predecessor has said so
(CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, ``griddepcontrol``). What is
read or overwritten of the predecessor then waits for ``griddepcontrol.wait``, which returns when the predecessor has
ended and its writes are visible.

The rules that make it safe, which every kernel launched through ``dependent`` keeps:

- It waits, in every block, before it loads anything that a kernel may have written and before it stores anything. Only
  weights of the loaded model, which no kernel writes while steps run, may be loaded before. Experts are not among them:
  which one to read is known after the wait, and a strategy may move them.
- It lets its dependents start *after* its own wait. A kernel that runs thus knows that all but its direct predecessor
  have ended, and since it waits for that one too, order is transitive over a chain of any length.
- A launch without the attribute (a library's, torch's, a copy) is a full barrier on both of its sides.
"""

from __future__ import annotations

import os

from attrs import evolve

from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import TritonLaunch

OLDEST_ARCH = 90
CONSTEXPR = "PDL"
OPTION = "launch_pdl"
VARIABLE = "FREETOKEN_DEPENDENT_LAUNCH"
"""``1`` switches it on, ``0`` off; off until it was measured and compared on a GPU. Read when launches are made."""


def dependent_launches(device: Device) -> bool:
    """Whether kernels on ``device`` are launched that way: the one place that decides it."""
    return device.arch >= OLDEST_ARCH and os.environ.get(VARIABLE, "0") == "1"


def dependent(launch: TritonLaunch, device: Device) -> TritonLaunch:
    """``launch`` of a kernel with a parameter ``PDL``, as ``device`` launches it. Both halves are part of the key."""
    return with_dependence(launch, dependent_launches(device))


def with_dependence(launch: TritonLaunch, on: bool) -> TritonLaunch:
    """The same where the decision is known already."""
    constexprs = (*launch.constexprs, (CONSTEXPR, on))
    options = (*launch.options, (OPTION, True)) if on else launch.options
    return evolve(launch, constexprs=constexprs, options=options)
