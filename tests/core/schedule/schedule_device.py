"""A simulated engine: steps over integers that notice every wrong page, stale state and lost token.

Each KV position and each state row holds a digest of all tokens up to it; the next token is a function of the digest
alone. ``faults`` collects every step that read what is not its request's own past (the engine core would turn an
exception into an answer), so that a scheduler that runs on it to the end, without faults and with the tokens of
``plain_answer``, has made no mistake the device could see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from freetoken.kv.manager import CacheManager, StateCopy
from freetoken.run.step_plan import StepPlan, StepRow, WindowPlan
from freetoken.schedule.engine_core import EngineCore, Output
from freetoken.schedule.scheduler import SchedulerLimits
from freetoken.vocab.sampling import SamplingParams

VOCAB, EOS = 11, 10
START = 17  # the digest of no tokens


def digest(before: int, token: int) -> int:
    return hash((before, token)) & 0xFFFF_FFFF


def digest_of(tokens: Sequence[int]) -> int:
    value = START
    for token in tokens:
        value = digest(value, token)
    return value


def choose(value: int, avoid: frozenset[int] = frozenset()) -> int:
    """The model's next token; ``avoid`` are tokens that ``min_tokens`` forbids."""
    token = (value >> 5) % VOCAB
    while token in avoid:
        token = (token + 1) % VOCAB
    return token


def plain_answer(prompt: Sequence[int], params: SamplingParams, max_context: int) -> tuple[list[int], str]:
    """The oracle: one request, no scheduler, no cache."""
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset({EOS}))
    limit = min(params.max_tokens or max_context, max_context - len(prompt))
    tokens: list[int] = []
    while len(tokens) < limit:
        avoid = stops if len(tokens) < params.min_tokens else frozenset()
        tokens.append(choose(digest_of([*prompt, *tokens]), avoid))
        if tokens[-1] in stops and len(tokens) > params.min_tokens:
            return tokens, "stop"
    return tokens, "length"


@define
class Clock:
    """Seconds that pass only when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@define(eq=False)
class Launched:
    """A step that is done at an instant of ``clock``; ``read`` may be told to fail."""

    tokens: list[int]
    clock: Clock
    done: float
    fails: bool = False

    @property
    def logprobs(self) -> list[object]:
        return [-float(token) for token in self.tokens]

    def read(self) -> Launched:
        self.clock.now = max(self.clock.now, self.done)
        if self.fails:
            raise RuntimeError("the device was lost")
        return self


@define(eq=False)
class SimulatedWindow:
    """Chunks that are computed when the last of ``layers`` layers is passed."""

    engine: SimulatedEngine
    plan: WindowPlan
    layers: int
    drawn: list[int] = field(factory=list)

    def advance(self) -> bool:
        self.engine.clock.now += 1e-3
        self.engine._maybe_refuse(self.plan.chunks)
        self.layers -= 1
        if self.layers:
            return False
        for row in self.plan.chunks:
            self.drawn += self.engine.compute(row)
        return True

    def finish(self) -> Launched:
        return Launched(self.drawn, self.engine.clock, 0.0)

    def close(self) -> None:
        pass


@define(eq=False)
class SimulatedEngine:
    """``hybrid``: state rows are used too. ``cost_s(plan)`` is how long a step takes on ``clock``."""

    page_tokens: int
    hybrid: bool
    clock: Clock
    cost_s: Callable[[StepPlan], float] = lambda plan: 1e-3
    kv: dict[int, tuple[int, int]] = field(factory=dict)  # position in the pool → token and digest
    states: dict[int, int] = field(factory=dict)
    lanes: dict[int, int] = field(factory=dict)
    known: dict[str, list[int]] = field(factory=dict)  # admitted requests: prompt and tokens drawn
    plans: list[StepPlan] = field(factory=list)
    busy_until: float = 0.0  # the device works through steps in the order of their launches
    fail_launch: bool = False
    fail_read: bool = False
    faults: list[str] = field(factory=list)
    failed: set[str] = field(factory=set)  # requests of steps that were told to fail

    def _expect(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)

    def launch(self, plan: StepPlan) -> Launched:
        self.plans.append(plan)
        self.busy_until = max(self.busy_until, self.clock.now) + self.cost_s(plan)
        self._maybe_refuse(plan.rows)
        self.copy_state(plan.copies)
        self._expect(len({row.request_id for row in plan.rows}) == len(plan.rows), "two rows of one request")
        drawn = [token for row in plan.rows for token in self.compute(row)]
        fails, self.fail_read = self.fail_read, False
        if fails:
            self.failed.update(row.request_id for row in plan.rows)
        return Launched(drawn, self.clock, self.busy_until, fails)

    def _maybe_refuse(self, rows: Sequence[StepRow]) -> None:
        if self.fail_launch:
            self.fail_launch = False
            self.failed.update(row.request_id for row in rows)
            raise RuntimeError("a kernel was refused")

    def open_window(self, plan: WindowPlan) -> SimulatedWindow:
        self.copy_state(plan.copies)
        return SimulatedWindow(self, plan, layers=3)

    def compute(self, row: StepRow) -> list[int]:
        """Run one row; the token it samples, if it does."""
        self._expect(len(row.tokens) > 0, f"{row.request_id} has nothing to compute")
        self._expect(len(row.pages) * self.page_tokens >= row.context_tokens, f"{row.request_id} has too few pages")
        value = self._read_prefix(row)
        tokens = [self.lanes[row.lane]] if row.pending else row.tokens
        for position, token in enumerate(tokens, row.prefix_tokens):
            value = digest(value, token)
            self.kv[self._place(row, position)] = token, value
        if self.hybrid:
            self.states[row.state_slot] = value
        return [] if row.sample is None else [self._sample(row, value)]

    def _read_prefix(self, row: StepRow) -> int:
        value = START
        for position in range(row.prefix_tokens):
            token, stored = self.kv.get(self._place(row, position), (-1, -1))
            value = digest(value, token)
            self._expect(stored == value, f"{row.request_id} reads another's KV at {position}")
        if self.hybrid and row.prefix_tokens:
            self._expect(self.states.get(row.state_slot) == value, f"{row.request_id} goes on from a wrong state")
        return value

    def _place(self, row: StepRow, position: int) -> int:
        page = row.pages[position // self.page_tokens]
        self._expect(page != 0, "the scratch page was handed out")
        return page * self.page_tokens + position % self.page_tokens

    def _sample(self, row: StepRow, value: int) -> int:
        assert row.sample is not None
        self._expect(row.request_id in self.known, f"the sampler was not told of {row.request_id}")
        history = self.known.get(row.request_id, [])
        self._expect(digest_of(history) == value, f"{row.request_id}: the sampler's history differs from what was run")
        token = choose(value, row.sample.stop_ids if row.sample.step < row.sample.params.min_tokens else frozenset())
        history.append(token)
        self.lanes[row.lane] = token
        return token

    def copy_state(self, copies: Sequence[StateCopy]) -> None:
        for copy in copies:
            self._expect(copy.source in self.states, f"{copy} copies a state that nobody made")
            self.states[copy.target] = self.states.get(copy.source, -1)

    def admit(self, request_id: str, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._expect(request_id not in self.known, "admitted twice")
        self.known[request_id] = [*prompt, *output]

    def forget(self, request_id: str) -> None:
        self.known.pop(request_id, None)


def make_core(
    *,
    pages: int = 64,
    page_tokens: int = 4,
    max_running: int = 4,
    max_step_tokens: int = 16,
    max_context: int = 200,
    max_gap_ms: float = 1000.0,
    hybrid: bool = False,
    snapshots: int = 3,
    overlap: bool = False,
    prefix_cache: bool = True,
    window: int = 0,
    cost_s: Callable[[StepPlan], float] = lambda plan: 1e-3,
) -> EngineCore:
    """An engine core over a simulated device; ``pages`` are those that requests can have."""
    clock = Clock()
    cache = CacheManager(
        num_pages=pages + 1, page_tokens=page_tokens, prefix_cache=prefix_cache,
        state_slots=max_running if hybrid else 0, snapshot_slots=snapshots if hybrid else 0,
    )  # fmt: skip
    context = min(max_context, pages * page_tokens)
    step = max(max_step_tokens, max_running)
    limits = SchedulerLimits(max_running, step, context, max_gap_ms, page_tokens, window)
    engine = SimulatedEngine(page_tokens, hybrid, clock, cost_s)
    return EngineCore(engine, cache, limits, frozenset({EOS}), VOCAB, overlap, clock=clock)


@define
class Answers:
    """What was told of each request."""

    tokens: dict[str, list[int]] = field(factory=dict)
    finish: dict[str, str] = field(factory=dict)
    times: dict[str, list[float]] = field(factory=dict)
    logprobs: dict[str, list[Any]] = field(factory=dict)

    def take(self, outputs: Sequence[Output], now: float) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.finish, f"{name} got news after its end"
            self.tokens.setdefault(name, []).extend(output.tokens)
            self.logprobs.setdefault(name, []).extend(output.logprobs)
            self.times.setdefault(name, []).extend([now] * len(output.tokens))
            if output.finish:
                self.finish[name] = output.finish


def simulated(core: EngineCore) -> SimulatedEngine:
    assert isinstance(core.engine, SimulatedEngine)
    return core.engine


def run(core: EngineCore, answers: Answers | None = None, max_steps: int = 5000) -> Answers:
    """Step until nothing is left."""
    answers = Answers() if answers is None else answers
    clock = simulated(core).clock
    for _ in range(max_steps):
        if core.idle:
            return answers
        answers.take(core.step(), clock.now)
    raise AssertionError(f"still busy after {max_steps} steps: {core.scheduler}")
