"""Runs a policy's steps: times them, says what they did and why, and tells running out of memory from other errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from attrs import frozen

from freetoken.run.scratch import ScratchForward
from freetoken.vocab.errors import EngineError
from freetoken.vocab.warmup import Capture, CompileKeys, Forward, LoadKeys, Touch, WarmupStep

_log = logging.getLogger("freetoken.warmup")


@frozen
class StepOutcome:
    """What became of one step. ``skipped`` carries the reason when it was not run."""

    step: WarmupStep
    seconds: float
    skipped: str = ""


@frozen
class WarmupOutcome:
    """All steps; ``max_tokens`` is the largest forward that fits, when one ran out of memory, else ``None``."""

    steps: tuple[StepOutcome, ...]
    max_tokens: int | None = None

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.steps)

    @property
    def done(self) -> int:
        return sum(1 for s in self.steps if not s.skipped)


@frozen
class StepActions:
    """How each kind of step is done here. Each returns when the work is done."""

    compile_keys: Callable[[CompileKeys], None]
    load_keys: Callable[[LoadKeys], None]
    touch: Callable[[Touch], None]
    forward: Callable[[Forward], None]
    capture: Callable[[Capture], None]

    def do(self, step: WarmupStep) -> None:
        match step:
            case CompileKeys():
                self.compile_keys(step)
            case LoadKeys():
                self.load_keys(step)
            case Touch():
                self.touch(step)
            case Forward():
                self.forward(step)
            case Capture():
                self.capture(step)


def run_steps(
    policy: str, steps: Iterable[WarmupStep], actions: StepActions, report: Callable[[float, str], None]
) -> WarmupOutcome:
    """Run every step. Out of memory at a forward skips all of at least as many tokens; any other error is raised as
    ``EngineError`` with the step and the cause."""
    wanted = list(steps)
    outcomes: list[StepOutcome] = []
    limit: int | None = None
    for index, step in enumerate(wanted):
        report(index / len(wanted), describe(step))
        if limit is not None and _tokens(step) >= limit:
            outcomes.append(StepOutcome(step, 0.0, f"a step of {limit} tokens ran out of memory"))
            continue
        start = time.perf_counter()
        try:
            actions.do(step)
        except Exception as error:
            if not is_out_of_memory(error) or not _tokens(step):
                raise EngineError(
                    f"warmup policy {policy}, step {describe(step)}", f"it failed: {type(error).__name__}: {error}",
                    "start with --warmup-policy none to serve without warmup",
                ) from error  # fmt: skip
            limit = _tokens(step)
            _log.warning("warmup: %s ran out of memory; larger steps are skipped", describe(step))
            outcomes.append(StepOutcome(step, time.perf_counter() - start, "out of memory"))
            continue
        outcomes.append(StepOutcome(step, time.perf_counter() - start))
    outcome = WarmupOutcome(tuple(outcomes), None if limit is None else limit - 1)
    _log_summary(policy, outcome)
    return outcome


def _log_summary(policy: str, outcome: WarmupOutcome) -> None:
    _log.info(
        "warmup policy %s: %d steps in %.2f s%s", policy, outcome.done, outcome.seconds,
        "" if len(outcome.steps) == outcome.done else f", {len(outcome.steps) - outcome.done} skipped",
    )  # fmt: skip
    for item in outcome.steps:
        state = item.skipped or f"{item.seconds * 1000:.0f} ms"
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
            text = f"forward of {point.tokens} tokens in {point.sequences} sequences" + (
                f", context {point.max_context}" if point.max_context > point.max_query else ""
            )
        case Capture():
            text = "capture decode graphs"
    return text + (f" ({step.because})" if step.because else "")


def _tokens(step: WarmupStep) -> int:
    return step.point.tokens if isinstance(step, Forward) else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the host or on a device."""
    if isinstance(error, MemoryError):
        return True
    name = type(error).__name__
    return name == "OutOfMemoryError" or "out of memory" in str(error).lower()


def cpu_actions(scratch: ScratchForward) -> StepActions:
    """On a CPU nothing is compiled, loaded or captured: only forwards do anything, and the other steps say so."""

    def refuse(step: WarmupStep) -> None:
        raise EngineError(describe(step), "there is nothing of the kind on a CPU")

    return StepActions(refuse, refuse, refuse, lambda step: scratch.run(step.point), lambda _: None)
