"""The warmup's runner. Oracle: a device that writes down what it was told, and faults put in by hand."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import pytest

from freetoken.models import llama
from freetoken.run.warmup import WarmupOutcome, WarmupRun, describe, is_out_of_memory, seconds_by_phase
from freetoken.testing.plans import planned
from freetoken.testing.warmup import example_space
from freetoken.vocab.errors import EngineError
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.plan import Plan, Sizing
from freetoken.vocab.warmup import Capture, CompileKeys, Forward, Known, LoadKeys, Touch, WarmupStep


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


class Device:
    """Writes down every call; ``fails`` maps a call to what it raises."""

    def __init__(self, fails: dict[object, Exception] | None = None) -> None:
        self.calls: list[object] = []
        self.fails = fails or {}
        self.compiled = threading.Event()

    def note(self, call: object) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise self.fails[call]

    def compile(self, step: CompileKeys, progress: Callable[[int], None]) -> str:
        for n, key in enumerate(step.keys):
            self.note(("compile", key))
            progress(n + 1)
        self.compiled.set()
        return f"{len(step.keys)} compiled"

    def load(self, step: LoadKeys, progress: Callable[[int], None]) -> str:
        for key in step.keys:
            self.note(("load", key))
        return ""

    def sweep(self, name: str, rows: int) -> None:
        self.note(("sweep", name, rows))


class Scratch:
    def __init__(self, device: Device) -> None:
        self.device = device

    def run(self, point: StepPoint) -> None:
        self.device.note(("forward", point.tokens))


class Policy:
    def __init__(self, *steps: WarmupStep, then: Exception | None = None) -> None:
        self._steps, self._then = steps, then

    def steps(self, plan: Plan, launch_space: object, known: Known) -> Iterable[WarmupStep]:
        yield from self._steps
        if self._then is not None:
            raise self._then


def forward(tokens: int) -> Forward:
    return Forward(StepPoint(tokens, 1, tokens, tokens, 1, decode=False), because="of the test")


def run(policy: Policy, device: Device, **more: object) -> WarmupOutcome:
    plan = planned(llama.tiny(), dtype="float32").plan
    warmup = WarmupRun("ours", policy, plan, example_space(), Known(), device, **more)  # type: ignore[arg-type]
    warmup.start_compile()
    warmup.load()
    device.calls.append("sizing")
    return warmup.finish(Scratch(device), lambda: device.note("capture"))


ALL = (
    CompileKeys(("a", "b")), LoadKeys(("a", "b")), Touch("gemm", (1, 8)), Capture(), forward(3), forward(64),
)  # fmt: skip


def test_compile_then_load_then_size_then_capture_then_forwards() -> None:
    device = Device()
    outcome = run(Policy(*ALL), device)
    assert device.calls == [
        ("compile", "a"), ("compile", "b"), ("load", "a"), ("load", "b"), ("sweep", "gemm", 1), ("sweep", "gemm", 8),
        "sizing", "capture", ("forward", 3), ("forward", 64),
    ]  # fmt: skip
    assert [item.step for item in outcome.steps] == list(ALL)
    assert (outcome.done, outcome.max_tokens, outcome.keys) == (6, None, {"a", "b"})
    assert set(seconds_by_phase(outcome)) == {"compile", "load", "sweep", "capture", "forward"}


def test_phases_hold_whatever_order_a_policy_chooses() -> None:
    device = Device()
    outcome = run(Policy(*reversed(ALL)), device)
    kinds = [call[0] if isinstance(call, tuple) else call for call in device.calls]
    assert kinds == ["compile"] * 2 + ["sweep"] * 2 + ["load"] * 2 + ["sizing"] + ["forward"] * 2 + ["capture"]
    assert [item.step for item in outcome.steps] == list(reversed(ALL))


def test_graphs_are_captured_under_a_policy_without_steps() -> None:
    device = Device()
    assert run(Policy(), device).steps == ()
    assert device.calls == ["sizing", "capture"]


def test_compiling_goes_on_while_the_caller_does_something_else() -> None:
    """``start_compile`` returns while a key is still being compiled; ``load`` waits for it and reports."""
    device = Device()
    go = threading.Event()
    original = device.compile

    def slow(step: CompileKeys, progress: Callable[[int], None]) -> str:
        assert go.wait(10)
        return original(step, progress)

    device.compile = slow  # type: ignore[method-assign]
    plan = planned(llama.tiny(), dtype="float32").plan
    said: list[str] = []

    def report(fraction: float, words: str) -> None:
        said.append(words)
        go.set()

    warmup = WarmupRun("ours", Policy(*ALL), plan, example_space(), Known(), device, report)
    warmup.start_compile()
    assert not device.compiled.is_set()
    warmup.load()
    assert device.compiled.is_set()
    assert any("compiled 0 of 2" in words or "looking" in words for words in said)


def test_what_is_known_is_asked_off_the_main_thread() -> None:
    asked: list[object] = []

    def known() -> Known:
        asked.append(threading.current_thread())
        return Known(because="read late")

    plan = planned(llama.tiny(), dtype="float32").plan
    WarmupRun("ours", Policy(), plan, example_space(), known, Device()).load()
    assert asked
    assert asked != [threading.main_thread()]


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemoryError("x"), RuntimeError("CUDA error: out of memory")])
def test_out_of_memory_skips_larger_steps_and_shrinks_what_is_served(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """By hand: 64 tokens do not fit, so 64 and 100 are skipped, 3 and 63 are run, and 63 is what is left."""
    device = Device({("forward", 64): error})
    steps = (forward(3), forward(64), forward(100), forward(63))
    with caplog.at_level(logging.INFO, "freetoken.warmup"):
        outcome = run(Policy(*steps), device)
    assert [call for call in device.calls if isinstance(call, tuple)] == [
        ("forward", 3),
        ("forward", 64),
        ("forward", 63),
    ]
    assert [bool(item.skipped) for item in outcome.steps] == [False, True, True, False]
    assert outcome.max_tokens == 63
    plan = planned(llama.tiny(), dtype="float32").plan
    sizing = Sizing.of(plan).shrunk("a warmup step ran out of memory", max_prefill_tokens=outcome.max_tokens)
    assert sizing.max_prefill_tokens == 63
    assert "ran out of memory at 64 tokens" in caplog.text
    assert "2 skipped" in caplog.text


def test_out_of_memory_in_a_sweep_bounds_the_forwards_too() -> None:
    device = Device({("sweep", "gemm", 8): OutOfMemoryError()})
    outcome = run(Policy(Touch("gemm", (1, 8, 16)), forward(7), forward(8)), device)
    assert [call for call in device.calls if isinstance(call, tuple)] == [
        ("sweep", "gemm", 1), ("sweep", "gemm", 8), ("forward", 7),
    ]  # fmt: skip
    assert outcome.max_tokens == 7
    assert outcome.steps[0].note == "out of memory at 8 rows"


@pytest.mark.parametrize(
    ("call", "step"),
    [
        (("compile", "b"), "compile 2 keys"),
        (("load", "a"), "load 2 modules"),
        (("sweep", "gemm", 8), "touch gemm"),
        ("capture", "capture decode graphs"),
        (("forward", 64), "forward of 64 tokens"),
    ],
)
def test_any_other_error_ends_the_start_with_step_and_cause(call: object, step: str) -> None:
    cause = RuntimeError("illegal memory access")
    with pytest.raises(EngineError) as failed:
        run(Policy(*ALL), Device({call: cause}))
    assert step in str(failed.value)
    assert "warmup policy ours" in str(failed.value)
    assert "illegal memory access" in str(failed.value)
    assert failed.value.__cause__ is cause


def test_a_policy_that_raises_ends_the_start_in_its_own_name() -> None:
    with pytest.raises(EngineError, match="warmup policy ours"):
        run(Policy(forward(3), then=ZeroDivisionError("theirs")), Device())


def test_the_log_says_steps_seconds_and_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "freetoken.warmup"):
        run(Policy(*ALL), Device())
    assert "warmup policy ours: 6 steps in " in caplog.text
    assert "forward of 3 tokens in 1 sequence (of the test)" in caplog.text
    assert "compile 2 keys: 0 ms, 2 compiled" in caplog.text


def test_out_of_memory_is_told_from_other_errors() -> None:
    assert not is_out_of_memory(RuntimeError("out of range"))
    assert not is_out_of_memory(EngineError("a step", "an illegal address"))
    assert is_out_of_memory(OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))


def test_steps_are_described_in_a_few_words() -> None:
    point = StepPoint(33, 33, 1, 4096, 33, decode=True)
    assert describe(Forward(point, because="x")) == "forward of 33 tokens in 33 sequences, context 4096 (x)"
    assert describe(Touch("gemm", (1, 2))) == "touch gemm at 2 row counts"
