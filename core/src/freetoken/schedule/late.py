"""Late events, told apart by step: whose requests waited for a compile or a load, and at which point of the space."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from freetoken.run.step_plan import StepPlan
from freetoken.vocab.launch import StepPoint
from freetoken.warmup.watch import COUNT, ERROR, LateEvent, LateWatch, late_error

_log = logging.getLogger("freetoken.engine")


@frozen
class LateStep:
    """A step that met something the warmup had not: its point, its requests, and what was met."""

    point: StepPoint
    requests: tuple[str, ...]
    events: tuple[LateEvent, ...]

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(map(str, self.events))


@define
class LateSteps:
    """Reads the watch around each step. ``tell`` is called with every step that met something, outside the launch."""

    watch: LateWatch = field(factory=LateWatch)
    tell: Callable[[LateStep], None] = lambda _: None
    _by_request: dict[str, int] = field(factory=dict)  # of those still running
    _noted: int = 0

    @property
    def seen(self) -> int:
        """How many events there have been; two integers compared are all that a step without any costs."""
        return self.watch.total

    def look(self, plan: StepPlan, seen: int) -> None:
        """After a launch: note what it met. Raises ``EngineError`` in the mode ``error``."""
        if self.watch.total == seen:
            return
        events = self.note(plan, seen)
        if self.watch.mode == ERROR:
            raise late_error(events)

    def note(self, plan: StepPlan, seen: int) -> tuple[LateEvent, ...]:
        """Attribute the events since ``seen`` to the step's requests, each once."""
        events = self.watch.since(max(seen, self._noted))
        self._noted = self.watch.total
        if events:
            step = LateStep(step_point(plan), tuple(row.request_id for row in plan.rows), events)
            for request in step.requests:
                self._by_request[request] = self._by_request.get(request, 0) + len(events)
            if self.watch.mode != COUNT:
                _log.warning("requests %s waited for %s", ", ".join(step.requests), ", ".join(map(str, events)))
            self.tell(step)
        return events

    def ended(self, request_id: str) -> None:
        """A request is over: say so if it had to wait for something."""
        met = self._by_request.pop(request_id, 0) if self._by_request else 0
        if met:
            _log.warning("request %s waited for %d compiles or loads that the warmup had left", request_id, met)


def step_point(plan: StepPlan) -> StepPoint:
    """The point of the step space at which ``plan`` lies."""
    queries: Sequence[int] = [len(row.tokens) for row in plan.rows]
    full = any(row.sample is not None and row.sample.params.route == "full" for row in plan.rows)
    return StepPoint(
        tokens=sum(queries),
        sequences=len(queries),
        max_query=max(queries),
        max_context=max(row.context_tokens for row in plan.rows),
        rows=len(plan.sampled),
        decode=all(n == 1 for n in queries) and all(row.prefix_tokens for row in plan.rows),
        sampler_route="full" if full else "fast",
    )
