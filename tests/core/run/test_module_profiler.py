"""The record of module loads. Oracles: torch's own profiler of the CPU, read the same way; a script."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from freetoken.run.module_profiler import (
    FUNCTION_LOADING,
    MODULE_LOADING,
    STAY_ATTACHED,
    NoProfiler,
    TorchModuleProfiler,
    count_loadings,
    module_profiler,
)
from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device


class Scripted:
    """What ``torch.profiler.profile`` looks like from outside, with names put in."""

    def __init__(self, names: list[str], told: list[str]) -> None:
        events = [SimpleNamespace(name=lambda n=name: n) for name in names]
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
        self.start: Callable[[], Any] = lambda: told.append("start")
        self.stop: Callable[[], Any] = lambda: told.append("stop")


def test_torchs_records_are_read_where_they_are() -> None:
    """The real profiler: an operation that ran meanwhile is among what was seen, and nothing was loaded."""
    ours = TorchModuleProfiler(lambda: profile(activities=[ProfilerActivity.CPU]))
    for _ in range(2):
        ours.begin()
        torch.ones(8).add_(1)
        found = ours.end()
        assert found.seen > 0
        assert found.events == {MODULE_LOADING: 0, FUNCTION_LOADING: 0}


def test_loadings_are_counted_by_name_and_an_empty_record_goes_first() -> None:
    told: list[str] = []
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted([FUNCTION_LOADING, "cudaLaunchKernel", MODULE_LOADING, FUNCTION_LOADING], told))
        return made[-1]

    ours = TorchModuleProfiler(make)
    ours.begin()
    assert told == ["start", "stop", "start"]
    found = ours.end()
    assert (found.events, found.seen) == ({MODULE_LOADING: 1, FUNCTION_LOADING: 2}, 4)
    assert len(made) == 2


def test_begin_and_end_take_turns() -> None:
    ours = TorchModuleProfiler(lambda: Scripted([], []))
    with pytest.raises(EngineError, match="none was begun"):
        ours.end()
    ours.begin()
    with pytest.raises(EngineError, match="under way"):
        ours.begin()
    assert ours.end() == count_loadings(())


def test_torch_stays_attached_between_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's own workaround sets the same two variables, in the function that the comment names."""
    for name in STAY_ATTACHED:
        monkeypatch.delenv(name, raising=False)
    module_profiler(Device("cuda")).make()  # type: ignore[attr-defined]
    assert {name: os.environ[name] for name in STAY_ATTACHED} == STAY_ATTACHED
    theirs = inspect.getsource(torch.profiler.profiler)
    assert all(f'os.environ["{name}"] = "{value}"' in theirs for name, value in STAY_ATTACHED.items())


def test_a_cpu_loads_no_modules() -> None:
    found = module_profiler(Device("cpu"))
    assert isinstance(found, NoProfiler)
    for call in (found.begin, found.end):
        with pytest.raises(EngineError, match="a CPU loads no modules"):
            call()
    assert isinstance(module_profiler(Device("cuda")), TorchModuleProfiler)
