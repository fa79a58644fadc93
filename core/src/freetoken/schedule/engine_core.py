"""The loop's body: take requests, plan a step, run it, read it, say what is new. Used by the worker and by ``LLM``."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import define, field, frozen

from freetoken.kv.manager import CacheManager, StateCopy
from freetoken.run.step_plan import StepPlan, WindowPlan
from freetoken.schedule.late import LateSteps
from freetoken.schedule.request import ScheduledRequest
from freetoken.schedule.scheduler import News, Scheduler, SchedulerLimits
from freetoken.vocab.errors import Refusal, UsageError
from freetoken.vocab.sampling import SamplingParams

_log = logging.getLogger("freetoken.engine")


class Sampled(Protocol):
    """A step's sampled tokens, once they are there; ``logprobs[i]`` belongs to ``tokens[i]`` and may be ``None``."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[object]: ...


class InFlight(Protocol):
    """A launched step."""

    def read(self) -> Sampled:
        """Wait for the step and return what it sampled, in the order of ``plan.sampled``."""
        ...


class Window(Protocol):
    """Chunks of a prompt on their way through the layers."""

    def advance(self) -> bool:
        """All chunks through one more layer; ``True`` when it was the last."""
        ...

    def finish(self) -> InFlight: ...

    def close(self) -> None:
        """Give it up: its request is gone."""
        ...


class StepEngine(Protocol):
    """What computes steps: the real engine, or a null one in benchmarks of the loop."""

    def launch(self, plan: StepPlan) -> InFlight: ...

    def open_window(self, plan: WindowPlan) -> Window:
        """Only called where ``SchedulerLimits.max_window_tokens`` asks for windows."""
        ...

    def copy_state(self, copies: Sequence[StateCopy]) -> None: ...

    def admit(self, request_id: str, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A request is about to run for the first time. Raises ``UsageError`` for wishes the model cannot meet."""
        ...

    def forget(self, request_id: str) -> None:
        """A request ended: drop what is kept for it."""
        ...


@frozen(eq=False)
class Output:
    """News for one request: its new tokens, why it ended, and per-token log-probabilities where asked."""

    request_id: str
    tokens: tuple[int, ...]
    finish: str = ""
    logprobs: tuple[object, ...] = ()
    cached_tokens: int = 0
    error: Refusal | None = None


@define(eq=False)
class _OpenWindow:
    """A window, when others last had a turn, and how long its last layer took."""

    plan: WindowPlan
    work: Window
    last_turn: float
    layer_ms: float = 0.0


@define
class EngineCore:
    """``overlap``: plan and launch the next step before the last one is read. ``clock`` counts seconds; deadlines are
    its instants."""

    engine: StepEngine
    cache: CacheManager
    limits: SchedulerLimits
    eos_ids: frozenset[int]
    vocab_size: int
    overlap: bool = False
    late: LateSteps = field(factory=LateSteps)
    clock: Callable[[], float] = time.monotonic
    scheduler: Scheduler = field(init=False)
    steps: int = 0
    _last_read: float = 0.0
    _flight: tuple[StepPlan, InFlight, float] | None = None
    _window: _OpenWindow | None = None

    def __attrs_post_init__(self) -> None:
        self.scheduler = Scheduler(self.cache, self.limits, self.clock)

    def submit(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, deadline: float | None = None
    ) -> None:
        """Queue a request. Raises ``UsageError`` when it can never be served."""
        room = self.limits.max_context_tokens - len(prompt)
        if not prompt:
            raise UsageError("an empty prompt", "at least one token is needed")
        if room < 1:
            raise UsageError(
                f"a prompt of {len(prompt)} tokens",
                f"the longest context is {self.limits.max_context_tokens} tokens, one of them for the answer",
                "shorten the prompt, or raise --max-seq-len or --kv-tokens",
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            odd = next(token for token in prompt if not 0 <= token < self.vocab_size)
            raise UsageError(f"token {odd} in a prompt", f"the vocabulary has {self.vocab_size} tokens, counted from 0")
        unknown = [token for token, _ in params.logit_bias if not 0 <= token < self.vocab_size]
        if unknown:
            raise UsageError(
                f"logit_bias for token {unknown[0]}", f"the vocabulary has {self.vocab_size} tokens, counted from 0"
            )
        stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        self.scheduler.add(
            ScheduledRequest(
                request_id=request_id,
                num_prompt=len(prompt),
                params=params,
                seed=seed,
                max_tokens=min(params.max_tokens or room, room),
                stop_ids=stop,
                tokens=list(prompt),
                deadline=deadline,
            )
        )

    def abort(self, request_id: str) -> None:
        if self.scheduler.drop(request_id) is not None:
            self._forget(request_id)
            self._drop_window()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self._flight is None

    def step(self) -> list[Output]:
        """Advance by one step; returns what became known. An empty list means that nothing was ready yet."""
        outputs = self._expire()
        if self._window is not None:
            return outputs + self._step_window(self._window)
        plan = self.scheduler.next_step()
        launched = self._launch(plan, outputs) if plan is not None else None
        previous, self._flight = (self._flight, launched) if self.overlap else (launched, None)
        if previous is not None:
            outputs += self._read(previous)
        window = self.scheduler.next_window()
        if window is not None:
            self._open_window(window, outputs)
        return outputs

    # ------------------------------------------------------------------------------------------- windows

    def _open_window(self, plan: WindowPlan, outputs: list[Output]) -> None:
        try:
            self._admit()
            self._window = _OpenWindow(plan, self.engine.open_window(plan), self.clock())
        except Exception as error:
            outputs += self._fail(plan.final, error)

    def _step_window(self, window: _OpenWindow) -> list[Output]:
        """Others' turn where one is due, then one layer for all chunks of the window."""
        previous, self._flight = self._flight, None
        outputs = self._read(previous) if previous is not None else []
        if self._turn_due(window):
            plan = self.scheduler.next_step()
            launched = self._launch(plan, outputs) if plan is not None else None
            outputs += self._read(launched) if launched is not None else []
            window.last_turn = self.clock()
        start, seen = self.clock(), self.late.seen
        try:
            done = window.work.advance()
            self.late.look(window.plan.final, seen)
            if done:
                outputs += self._end_window(window)
        except Exception as error:
            self.late.note(window.plan.final, seen)
            outputs += self._fail(window.plan.final, error)
        window.layer_ms = (self.clock() - start) * 1000
        return outputs

    def _turn_due(self, window: _OpenWindow) -> bool:
        """Whether another layer would take the gap between others' tokens beyond what is allowed."""
        if not self.scheduler.has_turns:
            return False
        waited_ms = (self.clock() - window.last_turn) * 1000
        return waited_ms + window.layer_ms >= 0.8 * self.limits.max_gap_ms

    def _end_window(self, window: _OpenWindow) -> list[Output]:
        """All layers are done: only now is anything of the window published."""
        sampled = window.work.finish().read()
        self._window = None
        self.scheduler.close_window()
        self.steps += 1
        return self._commit(window.plan.final, sampled)

    def _drop_window(self) -> None:
        """Give the window up when its request is gone."""
        if self._window is not None and self.scheduler.window is None:
            self._window.work.close()
            self._window = None

    # ------------------------------------------------------------------------------------------- steps

    def _launch(self, plan: StepPlan, outputs: list[Output]) -> tuple[StepPlan, InFlight, float] | None:
        start = self.clock()
        seen = self.late.seen
        try:
            self._admit()
            launched = plan, self.engine.launch(plan), start
            self.late.look(plan, seen)
            return launched
        except Exception as error:
            self.late.note(plan, seen)
            outputs += self._fail(plan, error)
            return None

    def _admit(self) -> None:
        for request in self.scheduler.take_admitted():
            self.engine.admit(
                request.request_id, request.params, request.tokens[: request.num_prompt],
                request.tokens[request.num_prompt :],
            )  # fmt: skip

    def _read(self, launched: tuple[StepPlan, InFlight, float]) -> list[Output]:
        plan, flight, start = launched
        try:
            sampled = flight.read()
        except Exception as error:
            return self._fail(plan, error)
        self.steps += 1
        self._observe(plan, start)
        return self._commit(plan, sampled)

    def _commit(self, plan: StepPlan, sampled: Sampled) -> list[Output]:
        """What a finished step means: tokens, published pages, snapshots."""
        logprobs = dict(zip((row.request_id for row in plan.sampled), sampled.logprobs, strict=False))
        news = self.scheduler.commit(plan, sampled.tokens)
        copies = self.scheduler.take_snapshots(plan)
        if copies:
            self.engine.copy_state(copies)
            for copy in copies:
                self.cache.confirm(copy)
        return [self._output(item, logprobs.get(item.request.request_id)) for item in news]

    def _observe(self, plan: StepPlan, start: float) -> None:
        chunks = [(len(row.tokens), row.context_tokens) for row in plan.rows if not row.decodes]
        tokens = sum(n for n, _ in chunks)
        context = sum(n * end for n, end in chunks) / max(tokens, 1)
        # A step that was launched while another ran has not begun before that one was done.
        now = self.clock()
        ms = (now - max(start, self._last_read)) * 1000
        self._last_read = now
        self.scheduler.speed.observe(tokens, len(plan.rows) - len(chunks), ms, context)

    def _output(self, item: News, logprob: object | None) -> Output:
        request = item.request
        if item.finish:
            self._forget(request.request_id)
        return Output(
            request_id=request.request_id,
            tokens=() if item.token is None else (item.token,),
            finish=item.finish,
            logprobs=() if logprob is None else (logprob,),
            cached_tokens=max(request.first_cached, 0),
        )

    def _forget(self, request_id: str) -> None:
        self.late.ended(request_id)
        self.engine.forget(request_id)

    def _expire(self) -> list[Output]:
        outputs = []
        for request in self.scheduler.expired():
            self._forget(request.request_id)
            outputs.append(Output(request.request_id, (), "deadline", cached_tokens=max(request.first_cached, 0)))
        self._drop_window()
        return outputs

    def _fail(self, plan: StepPlan, error: Exception) -> list[Output]:
        """The step's requests fail, the engine lives; the cause goes to the log whole and to clients in a line."""
        _log.error("a step failed", exc_info=error)
        refusal = Refusal("this request", f"the engine failed while computing it: {type(error).__name__}: {error}")
        outputs = []
        for row in plan.rows:
            if self.scheduler.drop(row.request_id) is not None:
                self._forget(row.request_id)
                outputs.append(Output(row.request_id, (), "error", error=refusal))
        self._drop_window()
        return outputs
