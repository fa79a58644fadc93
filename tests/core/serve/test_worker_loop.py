"""The engine process's loop and the profiler. Oracle: a profiler by script, on a pipe of our own."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from freetoken.run.module_profiler import Recorded
from freetoken.serve.messages import Profile, ProfileAnswer
from freetoken.serve.worker_loop import WorkerLoop
from freetoken.vocab.hardware import Device


class Scripted:
    """``fails`` is raised by both."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.told: list[str] = []
        self._fails = fails

    def begin(self) -> None:
        self._note("begin")

    def end(self) -> Recorded:
        self._note("end")
        return Recorded({"Lazy Function Loading": 2, "Runtime Triggered Module Loading": 0}, 50)

    def _note(self, call: str) -> None:
        self.told.append(call)
        if self._fails is not None:
            raise self._fails


def answers(profiler: Any, *asked: bool) -> list[ProfileAnswer]:
    ours, theirs = multiprocessing.Pipe()
    running = SimpleNamespace(plan=SimpleNamespace(device=Device("cpu")))
    loop = WorkerLoop(cast(Any, theirs), cast(Any, running))
    if profiler is not None:
        loop.profiler = profiler
    found = []
    for on in asked:
        assert loop._handle(Profile(on)), "the loop goes on"
        found.append(ours.recv())
    return found


def test_a_record_is_begun_and_ended() -> None:
    profiler = Scripted()
    begun, ended = answers(profiler, True, False)
    assert profiler.told == ["begin", "end"]
    assert begun == ProfileAnswer(True)
    loaded = (("Lazy Function Loading", 2), ("Runtime Triggered Module Loading", 0))
    assert ended == ProfileAnswer(False, loaded, 50)


@pytest.mark.parametrize("on", [True, False])
def test_what_goes_wrong_is_answered_and_the_loop_goes_on(on: bool) -> None:
    (answer,) = answers(Scripted(RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS")), on)
    assert answer == ProfileAnswer(on, why="CUPTI_ERROR_MULTIPLE_SUBSCRIBERS")


def test_a_cpu_says_that_it_has_none() -> None:
    (answer,) = answers(None, True)
    assert "a CPU loads no modules" in answer.why
