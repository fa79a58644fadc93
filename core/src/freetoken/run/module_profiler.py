"""What a device's driver loads while steps run, as its own profiler records it: evidence that no hook of ours brings.

CUPTI tells of it as overhead: a module that is loaded because a launch needs it, and a function that is loaded at its
first launch (NVIDIA, CUPTI documentation, ``CUpti_ActivityOverheadKind``). torch's profiler names them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from attrs import define, frozen

from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device

MODULE_LOADING = "Runtime Triggered Module Loading"
FUNCTION_LOADING = "Lazy Function Loading"
LOADINGS = (MODULE_LOADING, FUNCTION_LOADING)


@frozen
class Recorded:
    """``events`` counts ``LOADINGS``, zeros included; ``seen`` everything that was recorded."""

    events: Mapping[str, int]
    seen: int


class ModuleProfiler(Protocol):
    """Both are called by the thread that launches steps. Raise ``EngineError`` with the reason where it cannot be."""

    def begin(self) -> None: ...

    def end(self) -> Recorded: ...


class NoProfiler:
    """Of a device without one; ``why`` is told to whoever asks."""

    def __init__(self, why: str) -> None:
        self._why = why

    def begin(self) -> None:
        raise EngineError("a record of module loads", self._why)

    def end(self) -> Recorded:
        raise EngineError("a record of module loads", self._why)


@define
class TorchModuleProfiler:
    """``make`` builds a ``torch.profiler.profile`` of the device's activities, or what stands for one in a test."""

    make: Callable[[], Any]
    _running: Any = None

    def begin(self) -> None:
        """An empty record first: the profiler's own start loads things too."""
        if self._running is not None:
            raise EngineError("a record of module loads", "one is under way already", "end it first")
        empty = self.make()
        empty.start()
        empty.stop()
        running = self.make()
        running.start()
        self._running = running

    def end(self) -> Recorded:
        running, self._running = self._running, None
        if running is None:
            raise EngineError("the end of a record of module loads", "none was begun")
        running.stop()
        return count_loadings(event.name() for event in running.profiler.kineto_results.events())


def count_loadings(names: Iterable[str]) -> Recorded:
    """Counts events by name."""
    counts = Counter(names)
    return Recorded({name: counts[name] for name in LOADINGS}, sum(counts.values()))


def module_profiler(device: Device) -> ModuleProfiler:
    """The device's profiler; it is imported and started when it is first used."""
    if device.kind == "cpu":
        return NoProfiler("a CPU loads no modules")
    return TorchModuleProfiler(_cuda_profile)


STAY_ATTACHED = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
"""torch's profiler otherwise leaves CUPTI at the end of each record; entering it again beside CUDA graphs crashes (it
sets the same where it knows of graphs itself, in ``torch/profiler/profiler.py``)."""


def _cuda_profile() -> Any:
    from torch.profiler import ProfilerActivity, profile

    for name, value in STAY_ATTACHED.items():
        os.environ.setdefault(name, value)

    return profile(activities=[ProfilerActivity.CUDA])
