"""The watch. Oracles: compiles and loads that this process makes itself through Triton, and a plain subprocess."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import spaces
import triton
from triton import knobs

from freetoken.kv.manager import CacheManager
from freetoken.ops.triton_stub import Target, compile_request
from freetoken.run.step_plan import StepPlan
from freetoken.schedule.engine_core import EngineCore
from freetoken.schedule.late import LateStep, LateSteps
from freetoken.schedule.scheduler import SchedulerLimits
from freetoken.vocab.errors import EngineError
from freetoken.vocab.sampling import SamplingParams
from freetoken.warmup import compile_worker
from freetoken.warmup.watch import BUILD, COMPILE, LOAD, TUNE, LateEvent, LateWatch, watching


def compile_block(block: int) -> None:
    """Through Triton itself, with whatever listener is in place."""
    from triton.compiler import ASTSource

    from freetoken.ops.triton_stub import jit_function

    request = compile_request(spaces.one("by_row", 5, block)[0], Target(90))
    source = ASTSource(
        jit_function(request.kernel), dict(request.signature), dict(request.constants), dict(request.attrs)
    )
    triton.compile(source, target=request.target.gpu_target(), options=dict(request.options))


def load(name: str) -> None:
    """What ``CompiledKernel._init_handles`` tells around a load; a real one needs a device."""
    knobs.runtime.kernel_load_start_hook(None, None, name, {}, "hash")
    knobs.runtime.kernel_load_end_hook(object(), 1, name, {}, "hash")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_a_compile_is_counted_and_a_disk_hit_is_not() -> None:
    with watching() as watch:
        compile_block(16)
        assert (watch.counts[COMPILE], watch.compiles, watch.loads) == (1, 1, 0)
        assert watch.events[0].name == "by_row"
        assert watch.events[0].ms > 0
        compile_block(16)
        assert watch.counts[COMPILE] == 1


def test_a_module_load_of_a_compiled_kernel_is_counted() -> None:
    """Compile-only is not warm: the load comes later, and is what a request would wait for."""
    with watching() as watch:
        load("a_kernel")
    assert (watch.compiles, watch.loads) == (0, 1)
    assert watch.events == [LateEvent(LOAD, "a_kernel")]


def test_nothing_is_counted_before_or_after() -> None:
    watch = LateWatch()
    load("early")
    watch.arm()
    watch.disarm()
    load("late")
    compile_block(32)
    assert watch.total == 0


def test_listeners_of_others_are_chained_and_put_back() -> None:
    told = []
    before = knobs.compilation.listener
    knobs.compilation.listener = theirs = lambda **what: told.append(what["cache_hit"])
    try:
        with watching() as watch:
            compile_block(64)
        assert (told, watch.compiles) == ([False], 1)
        assert knobs.compilation.listener is theirs
    finally:
        knobs.compilation.listener = before
    assert knobs.runtime.jit_cache_hook is None, "a veto there drops launches silently"


def test_a_tuning_run_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner's own table grows when it times its configurations; that is what is looked at before Triton 3.8."""
    from triton.runtime.autotuner import Autotuner

    def times(tuner: Any, *args: Any, **_: Any) -> None:
        tuner.cache[args] = "the fastest"

    monkeypatch.setattr(Autotuner, "run", times)
    tuner = SimpleNamespace(cache={}, base_fn=SimpleNamespace(__name__="tuned"))
    with watching() as watch:
        if hasattr(knobs, "autotuning") and hasattr(knobs.autotuning, "listener"):
            knobs.autotuning.listener(fn=tuner.base_fn, cache_hit=False, duration=0.1)
        else:
            Autotuner.run(tuner, 1)
            Autotuner.run(tuner, 1)
    assert (watch.counts[TUNE], watch.compiles) == (1, 1)
    assert Autotuner.run is times


@pytest.mark.parametrize(("program", "counted"), [("gcc", 1), ("x86_64-linux-gnu-gcc", 1), ("true", 0)])
def test_a_native_build_is_counted(tmp_path: Path, program: str, counted: int) -> None:
    compiler = tmp_path / program
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    with watching() as watch:
        subprocess.run([str(compiler)], check=True)
    assert watch.counts[BUILD] == counted


def test_warn_says_what_and_count_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with watching("count"):
        load("quiet")
    with watching("warn"):
        load("loud")
    assert "load of loud" in caplog.text
    assert "quiet" not in caplog.text


def test_error_raises_when_the_module_is_there_and_before_the_launch() -> None:
    order: list[str] = []
    knobs.runtime.kernel_load_start_hook.add(start := lambda *_: order.append("loading"))
    try:
        with watching("error"), pytest.raises(EngineError, match="a_kernel"):
            _ = load("a_kernel"), order.append("launched")
    finally:
        knobs.runtime.kernel_load_start_hook.remove(start)
    assert order == ["loading"]


# ------------------------------------------------------------------------------------------------ in the loop


class Launched:
    def __init__(self, plan: StepPlan) -> None:
        self.tokens = [7] * len(plan.sampled)
        self.logprobs = [None] * len(plan.sampled)

    def read(self) -> Launched:
        return self


class Engine:
    """Loads a module in the steps of ``late`` tokens."""

    def __init__(self, late: int) -> None:
        self.late = late

    def launch(self, plan: StepPlan) -> Launched:
        if plan.num_tokens == self.late:
            self.late = -1  # it is there afterwards, whether or not the step was let through
            load("late_kernel")
        return Launched(plan)

    def copy_state(self, copies: object) -> None: ...
    def admit(self, *_: object) -> None: ...
    def forget(self, request_id: str) -> None: ...


def serve(mode: str, prompts: dict[str, int]) -> tuple[dict[str, str], list[LateStep], LateWatch]:
    told: list[LateStep] = []
    watch = LateWatch(mode)
    core = EngineCore(
        engine=Engine(late=5),
        cache=CacheManager(num_pages=64, page_tokens=16, prefix_cache=False),
        limits=SchedulerLimits(
            max_running=4, max_step_tokens=64, max_context_tokens=128, max_gap_ms=1e9, page_tokens=16
        ),
        eos_ids=frozenset(),
        vocab_size=100,
        late=LateSteps(watch, told.append),
    )
    watch.arm()
    finished: dict[str, str] = {}
    try:
        for name, tokens in prompts.items():
            core.submit(name, [1] * tokens, SamplingParams(temperature=0, max_tokens=2))
            while not core.idle:
                finished.update({output.request_id: output.finish for output in core.step() if output.finish})
    finally:
        watch.disarm()
    return finished, told, watch


def test_late_events_are_told_with_their_step_and_its_requests() -> None:
    finished, told, watch = serve("count", {"short": 3, "unlucky": 5, "long": 9})
    assert set(finished.values()) == {"length"}
    (step,) = told
    assert (step.requests, step.words) == (("unlucky",), ("load of late_kernel",))
    assert (step.point.tokens, step.point.sequences, step.point.max_context, step.point.decode) == (5, 1, 5, False)
    assert (watch.loads, watch.total) == (1, 1)


def test_error_fails_that_steps_requests_and_the_engine_lives(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        finished, told, watch = serve("error", {"short": 3, "unlucky": 5, "again": 5, "long": 9})
    assert finished == {"short": "length", "unlucky": "error", "again": "length", "long": "length"}
    assert len(told) == 1, "counted once, though it was met by the launch and by the failure"
    assert watch.total == 1
    assert "late_kernel" in caplog.text


def test_the_compilers_of_workers_are_not_late_events() -> None:
    """A compile worker is an interpreter; what it compiles is the warmup's own doing."""
    request = compile_request(spaces.one("by_row", 5, 256)[0], Target(90))
    with watching() as watch:
        report = compile_worker.compile_requests([request], workers=1)
    assert report.compiled == 1
    assert watch.total == 0
