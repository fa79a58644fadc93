"""Runs a policy's steps in three phases around a start: compile beside the weights, load before sizing, then the rest.

It times the steps, says what they did and why, and tells running out of memory from other errors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol

from attrs import frozen

from freetoken.plugin.protocols import WarmupPolicy
from freetoken.vocab.errors import EngineError, FreeTokenError
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Capture, CompileKeys, Forward, Known, LoadKeys, Touch, WarmupStep
from freetoken.warmup.launch_space import DeclaredLaunchSpace

_log = logging.getLogger("freetoken.warmup")
_POLL_S = 0.1

Report = Callable[[float, str], None]
"""Progress within the warmup: a fraction and a few words."""


class Scratch(Protocol):
    """What runs forwards: ``run.scratch.ScratchForward``, or a stand-in."""

    def run(self, point: StepPoint) -> None: ...


class KeyDevice(Protocol):
    """What compiles, loads and sweeps: ``run.warmup_device.WarmupDevice``, or a stand-in. Each returns when done."""

    def compile(self, step: CompileKeys, progress: Callable[[int], None]) -> str:
        """Compile a step's keys; returns what became of them in a few words. Raises ``EngineError`` for a failure."""
        ...

    def load(self, step: LoadKeys, progress: Callable[[int], None]) -> str: ...

    def sweep(self, name: str, rows: int) -> None:
        """One call of a library with so many rows; or build and load a native module of this name."""
        ...


@frozen
class StepOutcome:
    """What became of one step. ``skipped`` carries the reason when it was not run, ``note`` what it says of itself."""

    step: WarmupStep
    seconds: float
    skipped: str = ""
    note: str = ""


@frozen
class WarmupOutcome:
    """All steps in the policy's order; ``max_tokens`` is the largest step that fits, when one ran out of memory.

    ``waited_seconds`` is what the start spent on the warmup: compiling beside the weights costs it nothing.
    """

    steps: tuple[StepOutcome, ...]
    max_tokens: int | None = None
    waited_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.steps)

    @property
    def done(self) -> int:
        return sum(1 for s in self.steps if not s.skipped)

    @property
    def keys(self) -> frozenset[str]:
        """The keys that are compiled and loaded now."""
        loaded = (s.step.keys for s in self.steps if isinstance(s.step, LoadKeys) and not s.skipped)
        return frozenset(key for keys in loaded for key in keys)


class WarmupRun:
    """One warmup. ``start_compile`` returns at once; ``load`` waits for it; ``finish`` returns the outcome.

    ``known`` may be a function: it is called before the policy is asked, off the main thread, since reading what an
    earlier start left takes a while. Raises ``EngineError`` with the step and its cause, from ``load`` or ``finish``.
    """

    def __init__(
        self,
        name: str,
        policy: WarmupPolicy,
        plan: Plan,
        space: DeclaredLaunchSpace,
        known: Known | Callable[[], Known],
        device: KeyDevice,
        report: Report = lambda _fraction, _words: None,
    ) -> None:
        self.name = name
        self.space = space
        self.steps: tuple[WarmupStep, ...] = ()
        self._policy = policy
        self._plan = plan
        self._known = known
        self._device = device
        self._report = report
        self._outcomes: dict[int, StepOutcome] = {}
        self._compiled = 0
        self._to_compile = 0
        self._limit: int | None = None
        self._waited = 0.0
        self._compiling: Future[None] | None = None

    # ------------------------------------------------------------------------------------------- before the weights

    def start_compile(self) -> None:
        """Ask the policy for its steps and compile what they name, in the background."""
        self._compiling = Future()
        threading.Thread(target=self._compile_phase, args=(self._compiling,), daemon=True, name="warmup").start()

    def _compile_phase(self, done: Future[None]) -> None:
        try:
            known = self._known if isinstance(self._known, Known) else self._known()
            self.steps = tuple(self._policy.steps(self._plan, self.space, known))
            self._to_compile = sum(len(s.keys) for s in self.steps if isinstance(s, CompileKeys))
            for index, step in enumerate(self.steps):
                if isinstance(step, CompileKeys):
                    before = self._compiled
                    self._do(index, lambda s=step, b=before: self._device.compile(s, lambda n: self._count(b + n)))  # type: ignore[misc]
        except BaseException as error:  # handed to whoever waits in ``load``
            done.set_exception(error)
        else:
            done.set_result(None)

    def _count(self, compiled: int) -> None:
        self._compiled = compiled

    # ------------------------------------------------------------------------------------------- before the sizing

    def load(self) -> None:
        """Wait for the compilers, then load modules and sweep libraries: what takes device memory that is not ours."""
        started = time.perf_counter()
        self._join()
        steps = [(i, s) for i, s in enumerate(self.steps) if isinstance(s, LoadKeys | Touch)]
        for place, (index, step) in enumerate(steps):
            self._report(place / len(steps), describe(step))
            if isinstance(step, LoadKeys):
                self._do(index, lambda s=step: self._device.load(s, lambda _: None))  # type: ignore[misc]
            else:
                self._do(index, lambda s=step: self._sweep(s))  # type: ignore[misc]
        self._waited += time.perf_counter() - started

    def _join(self) -> None:
        if self._compiling is None:
            self.start_compile()
        assert self._compiling is not None
        while not self._compiling.done():
            if self._to_compile:
                self._report(self._compiled / self._to_compile, f"compiled {self._compiled} of {self._to_compile} keys")
            else:
                self._report(0.0, "looking for what there is to warm")
            time.sleep(_POLL_S)
        try:
            self._compiling.result()
        except FreeTokenError:
            raise
        except Exception as error:
            raise EngineError(
                f"warmup policy {self.name}", f"it failed: {type(error).__name__}: {error}",
                "start with --warmup-policy none to serve without warmup",
            ) from error  # fmt: skip

    def _sweep(self, step: Touch) -> str:
        """Row by row, so that running out of memory tells how many rows fit."""
        for rows in sorted(step.tokens) or (0,):
            if self._limit is not None and rows >= self._limit:
                return f"up to {rows - 1} rows: more ran out of memory"
            try:
                self._device.sweep(step.name, rows)
            except Exception as error:
                if not is_out_of_memory(error) or not rows:
                    raise
                self._out_of_memory(rows, step)
                return f"out of memory at {rows} rows"
        return ""

    # ------------------------------------------------------------------------------------------- after the sizing

    def finish(self, scratch: Scratch, capture: Callable[[], None] = lambda: None) -> WarmupOutcome:
        """Capture graphs and run forwards in the policy's order; capture happens whether a step asks for it or not."""
        started = time.perf_counter()
        steps = [(i, s) for i, s in enumerate(self.steps) if isinstance(s, Forward | Capture)]
        for place, (index, step) in enumerate(steps):
            self._report(place / len(steps), describe(step))
            if isinstance(step, Forward):
                self._forward(index, step, scratch)
            else:
                self._do(index, lambda: _done(capture))
        if not any(isinstance(step, Capture) for _, step in steps):
            capture()
        self._waited += time.perf_counter() - started
        return self._outcome()

    def _forward(self, index: int, step: Forward, scratch: Scratch) -> None:
        tokens = step.point.tokens
        if self._limit is not None and tokens >= self._limit:
            self._outcomes[index] = StepOutcome(step, 0.0, f"a step of {self._limit} tokens ran out of memory")
            return
        started = time.perf_counter()
        try:
            scratch.run(step.point)
        except Exception as error:
            if not is_out_of_memory(error):
                raise self._failed(step, error) from error
            self._out_of_memory(tokens, step)
            self._outcomes[index] = StepOutcome(step, time.perf_counter() - started, "out of memory")
            return
        self._outcomes[index] = StepOutcome(step, time.perf_counter() - started)

    def _outcome(self) -> WarmupOutcome:
        outcomes = tuple(self._outcomes[index] for index in range(len(self.steps)))
        limit = None if self._limit is None else self._limit - 1
        outcome = WarmupOutcome(outcomes, limit, self._waited)
        log_outcome(self.name, outcome)
        return outcome

    # ------------------------------------------------------------------------------------------- shared

    def _do(self, index: int, work: Callable[[], str]) -> None:
        step = self.steps[index]
        started = time.perf_counter()
        try:
            note = work()
        except Exception as error:
            raise self._failed(step, error) from error
        self._outcomes[index] = StepOutcome(step, time.perf_counter() - started, note=note)

    def _out_of_memory(self, tokens: int, step: WarmupStep) -> None:
        self._limit = tokens if self._limit is None else min(self._limit, tokens)
        _log.warning("warmup: %s ran out of memory at %d tokens; larger steps are skipped", describe(step), tokens)

    def _failed(self, step: WarmupStep, error: Exception) -> EngineError:
        cause = error.refusal.found or error.refusal.asked if isinstance(error, FreeTokenError) else str(error)
        return EngineError(
            f"warmup policy {self.name}, step {describe(step)}", f"it failed: {type(error).__name__}: {cause}",
            "start with --warmup-policy none to serve without warmup",
        )  # fmt: skip


def _done(work: Callable[[], None]) -> str:
    work()
    return ""


def log_outcome(policy: str, outcome: WarmupOutcome) -> None:
    """A line for the whole, one for each step; details of single keys and rows are in ``freetoken warmup report``."""
    skipped = len(outcome.steps) - outcome.done
    _log.info(
        "warmup policy %s: %d steps in %.2f s, of which the start waited %.2f s%s",
        policy, outcome.done, outcome.seconds, outcome.waited_seconds, f", {skipped} skipped" if skipped else "",
    )  # fmt: skip
    for item in outcome.steps:
        state = item.skipped or f"{item.seconds * 1000:.0f} ms" + (f", {item.note}" if item.note else "")
        _log.info("warmup: %s: %s", describe(item.step), state)


def describe(step: WarmupStep) -> str:
    """A step in a few words, with its reason."""
    match step:
        case CompileKeys(keys=keys):
            text = f"compile {len(keys)} keys"
        case LoadKeys(keys=keys):
            text = f"load {len(keys)} modules"
        case Touch(name=name, tokens=tokens):
            text = f"touch {name}" + (f" at {len(tokens)} row counts" if tokens else "")
        case Forward(point=point):
            text = describe_point(point)
        case Capture():
            text = "capture decode graphs"
    return text + (f" ({step.because})" if step.because else "")


def describe_point(point: StepPoint) -> str:
    """``forward of 5 tokens in 2 sequences, context 4096``."""
    tokens = "1 token" if point.tokens == 1 else f"{point.tokens} tokens"
    sequences = "1 sequence" if point.sequences == 1 else f"{point.sequences} sequences"
    context = f", context {point.max_context}" if point.max_context > point.max_query else ""
    return f"forward of {tokens} in {sequences}{context}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the host or on a device."""
    if isinstance(error, MemoryError):
        return True
    name = type(error).__name__
    return name == "OutOfMemoryError" or "out of memory" in str(error).lower()


def seconds_by_phase(outcome: WarmupOutcome) -> Mapping[str, float]:
    """Seconds spent compiling, loading, sweeping, capturing and in forwards."""
    names = {CompileKeys: "compile", LoadKeys: "load", Touch: "sweep", Capture: "capture", Forward: "forward"}
    found = dict.fromkeys(names.values(), 0.0)
    for item in outcome.steps:
        found[names[type(item.step)]] += item.seconds
    return found
