"""Decides what each step computes: decodes first, then chunks of prompts, within a token budget. Integers only.

The caller alternates ``next_step`` and ``commit``. One step may be in flight while the next is planned: its sampled
tokens are then *pending* and are fed from the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from freetoken.kv.manager import CacheManager, StateCopy
from freetoken.run.step_plan import SamplingRow, StepPlan, StepRow, WindowPlan
from freetoken.schedule.prefill_budget import StepBudget, StepSpeed, step_budget
from freetoken.schedule.request import ScheduledRequest


@frozen
class SchedulerLimits:
    """``max_context_tokens`` bounds one request; the budget of a step is ``max_step_tokens``."""

    max_running: int
    max_step_tokens: int
    max_context_tokens: int
    max_gap_ms: float
    page_tokens: int
    max_window_tokens: int = 0  # of a prompt that passes the layers in windows; 0: none does


@frozen(eq=False)
class News:
    """What a committed step means for one request: a new token (or none), and why it ended (or ``""``)."""

    request: ScheduledRequest
    token: int | None
    finish: str = ""


@define
class Scheduler:
    """Owns the queue of waiting requests and the running ones, and moves them through the cache."""

    cache: CacheManager
    limits: SchedulerLimits
    clock: Callable[[], float]
    speed: StepSpeed = field(factory=StepSpeed)
    waiting: deque[ScheduledRequest] = field(factory=deque)
    running: list[ScheduledRequest] = field(factory=list)
    preemptions: int = 0
    window: ScheduledRequest | None = None  # whose chunks are on their way through the layers, step by step
    _by_id: dict[str, ScheduledRequest] = field(factory=dict)
    _lanes: list[int] = field(factory=list)
    _admitted: list[ScheduledRequest] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._lanes = list(range(self.limits.max_running - 1, -1, -1))

    # ------------------------------------------------------------------------------------------- coming and going

    def add(self, request: ScheduledRequest) -> None:
        self._by_id[request.request_id] = request
        self.waiting.append(request)

    def drop(self, request_id: str) -> ScheduledRequest | None:
        """Forget a request and free its pages at once; ``None`` when it is not known (any more)."""
        request = self._by_id.pop(request_id, None)
        if request is None:
            return None
        if request.lane >= 0:
            self._release(request)
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        if request in self._admitted:  # it never got as far as a step
            self._admitted.remove(request)
        return request

    def expired(self) -> list[ScheduledRequest]:
        """Requests whose deadline has passed, dropped."""
        now = self.clock()
        late = [r for r in self._by_id.values() if r.deadline is not None and r.deadline <= now]
        for request in late:
            self.drop(request.request_id)
        return late

    @property
    def idle(self) -> bool:
        return not self._by_id

    # ------------------------------------------------------------------------------------------- planning

    def next_step(self) -> StepPlan | None:
        """The next step, or ``None`` when nothing can be launched (idle, or all wait for the step in flight)."""
        rows = self._decode_rows()
        # Whoever gets no row now, for want of a page, waits for the end of this step all the same.
        decodes = len(rows) or int(any(r.decoding and not r.will_end for r in self.running))
        limits = self.limits
        budget = step_budget(limits.max_step_tokens, decodes, self.speed, limits.max_gap_ms, limits.page_tokens)
        copies: list[StateCopy] = []
        for request in [r for r in self.running if r.prefilling and not r.snapshot_due]:
            if not self._in_windows(request):
                self._chunk(request, budget, rows)
        while budget.open and self.waiting and self._lanes:
            request = self.waiting[0]
            if not self._admit(request, copies):
                break
            if not self._in_windows(request):
                self._chunk(request, budget, rows)
        return StepPlan(tuple(rows), tuple(copies)) if rows else None

    def next_window(self) -> WindowPlan | None:
        """Chunks of the first prompt that is longer than a step; call ``close_window`` when they are computed.

        Until then the request takes part in no other step. A window ends where a snapshot is due.
        """
        wishes = (r for r in self.running if self._in_windows(r) and not r.snapshot_due)
        request = next(wishes, None) if self.window is None else None
        if request is None or request.cache is None:
            return None
        start = request.scheduled
        end = min(start + self.limits.max_window_tokens, request.length)
        points = self._snapshot_points(request, end)
        if points:
            end = points[0]
            request.snapshot_due = True
        restore = request.cache.restore if start == request.cache.cached_tokens else None
        step = self.limits.max_step_tokens
        chunks = [self._row(request, min(at + step, end)) for at in range(start, end, step)]
        self.window = request
        return WindowPlan(tuple(chunks), () if restore is None else (restore,))

    def close_window(self) -> None:
        """The window is computed: its request goes on in ordinary steps."""
        self.window = None

    @property
    def has_turns(self) -> bool:
        """Whether some request could use a step between two layers of the window."""
        others = any(r is not self.window and r.todo > 0 for r in self.running)
        return others or bool(self.waiting and self._lanes)

    def _in_windows(self, request: ScheduledRequest) -> bool:
        """Whether the request is in a window, or waits for one."""
        limits = self.limits
        if request is self.window:
            return True
        long = request.todo > limits.max_step_tokens and limits.max_window_tokens > limits.max_step_tokens
        return long and not request.decoding and request.unread == 0

    def _decode_rows(self) -> list[StepRow]:
        rows: list[StepRow] = []
        for request in list(self.running):
            waits = request.will_end or request.snapshot_due or request is self.window
            if request.lane < 0 or not request.decoding or waits:
                continue
            if self._reserve_or_preempt(request):
                rows.append(self._row(request, request.scheduled + 1))
        # A request preempted for the sake of a later one may already have a row.
        return [row for row in rows if self._by_id[row.request_id].lane >= 0]

    def _reserve_or_preempt(self, request: ScheduledRequest) -> bool:
        """Pages for one more token, taking them from the youngest request if need be."""
        assert request.cache is not None
        if request.scheduled < len(request.cache.pages) * self.cache.page_tokens:
            return True  # the common case, without the cache manager's own checks
        while not self.cache.reserve(request.cache, request.scheduled + 1):
            victims = [r for r in self.running if r.unread == 0 and not r.snapshot_due and r is not self.window]
            if len(victims) < len(self.running):
                return False  # read the step in flight first: its tokens must not be lost
            victim = victims[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: ScheduledRequest) -> None:
        self.preemptions += 1
        self._release(request)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _admit(self, request: ScheduledRequest, copies: list[StateCopy]) -> bool:
        """Give a waiting request a lane, its cached prefix and pages for all its tokens; ``False``: no room."""
        seq = self.cache.open(request.tokens)
        if seq is None:
            return False
        if not self.cache.reserve(seq, min(len(request.tokens) + 1, self.limits.max_context_tokens)):
            self.cache.close(seq)
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.cache = seq
        request.lane = self._lanes.pop()
        request.scheduled = seq.cached_tokens
        if request.first_cached < 0:
            request.first_cached = seq.cached_tokens
            self._admitted.append(request)
        if seq.restore is not None and not self._in_windows(request):
            copies.append(seq.restore)
        return True

    def _chunk(self, request: ScheduledRequest, budget: StepBudget, rows: list[StepRow]) -> None:
        """Add the request's next chunk, as far as ``budget`` allows."""
        start = request.scheduled
        allowed = budget.allowed(start)
        if allowed == 0 or request.will_end:
            return
        end = min(start + allowed, request.length)
        points = self._snapshot_points(request, end)
        if points:
            end = points[0]
            request.snapshot_due = True
        rows.append(self._row(request, end))
        budget.take(end - start, start)

    def _snapshot_points(self, request: ScheduledRequest, end: int) -> list[int]:
        assert request.cache is not None
        points = self.cache.snapshot_points(request.cache, len(request.tokens), end)
        return [p for p in points if p > request.scheduled]

    def _row(self, request: ScheduledRequest, end: int) -> StepRow:
        """The row computing tokens ``[scheduled, end)``; marks them as scheduled."""
        start = request.scheduled
        seq = request.cache
        assert seq is not None, "only running requests get rows"
        pending = request.unread == 1
        tokens = [0] if pending else request.tokens[start:end]
        last = end == request.length
        step = request.num_generated + request.unread
        row = StepRow(
            request_id=request.request_id,
            lane=request.lane,
            tokens=tokens,
            prefix_tokens=start,
            pages=seq.pages,
            pages_version=seq.pages_version,
            state_slot=seq.state_slot,
            pending=pending,
            sample=SamplingRow(request.request_id, request.params, request.seed, step, request.stop_ids)
            if last
            else None,
        )
        request.scheduled = end
        request.unread += last
        return row

    def take_admitted(self) -> list[ScheduledRequest]:
        """Requests that run for the first time in the step just planned."""
        admitted, self._admitted = self._admitted, []
        return admitted

    # ------------------------------------------------------------------------------------------- reading

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[News]:
        """Read a finished step: ``tokens`` are one for each of ``plan.sampled``, in order."""
        drawn = iter(tokens)
        news = []
        for row in plan.rows:
            token = next(drawn) if row.sample is not None else None
            request = self._owner(row)
            if request is None:
                continue  # dropped or preempted while the step ran
            item = self._commit_row(request, row, token)
            if item is not None:
                news.append(item)
        return news

    def _owner(self, row: StepRow) -> ScheduledRequest | None:
        """The request ``row`` was made for, if it still runs on the same pages."""
        request = self._by_id.get(row.request_id)
        if request is None or request.cache is None or request.cache.pages is not row.pages:
            return None
        return request

    def _commit_row(self, request: ScheduledRequest, row: StepRow, token: int | None) -> News | None:
        assert request.cache is not None
        if not row.pending and len(row.tokens) > 1:
            self.cache.publish(request.cache, request.tokens[: row.context_tokens])
        if token is None:
            return None
        request.unread -= 1
        request.tokens.append(token)
        finish = self._finish(request, token)
        if finish:
            # The last token was sampled, not computed: its K and V are not in the cache.
            self.cache.publish(request.cache, request.tokens[: row.context_tokens])
            self.drop(request.request_id)
        return News(request, token, finish)

    def _finish(self, request: ScheduledRequest, token: int) -> str:
        if token in request.stop_ids and request.num_generated > request.params.min_tokens:
            return "stop"
        if request.num_generated >= request.max_tokens or len(request.tokens) >= self.limits.max_context_tokens:
            return "length"
        return ""

    def take_snapshots(self, plan: StepPlan) -> list[StateCopy]:
        """Copies to make now, before the next step, of states that are worth keeping; then ``confirm`` each."""
        copies = []
        for row in plan.rows:
            request = self._owner(row)
            if request is None or request.cache is None or not request.snapshot_due:
                continue
            if row.context_tokens != request.scheduled:
                continue  # an earlier chunk: the one that ends at the snapshot's point is in flight
            request.snapshot_due = False
            copy = self.cache.snapshot(request.cache, request.tokens[: row.context_tokens])
            if copy is not None:
                copies.append(copy)
        return copies

    def _release(self, request: ScheduledRequest) -> None:
        assert request.cache is not None
        if request is self.window:
            self.window = None
        self.cache.close(request.cache)
        self._lanes.append(request.lane)
        request.cache, request.lane, request.scheduled = None, -1, 0
        request.unread, request.snapshot_due = 0, False
