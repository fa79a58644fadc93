"""One step as the scheduler hands it to the runner: rows of host integers. No tensors."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from freetoken.kv.manager import StateCopy
from freetoken.vocab.sampling import SamplingParams


@frozen(eq=False)
class SamplingRow:
    """What the sampler needs to draw one token. ``step`` counts the request's generated tokens, from 0."""

    request_id: str
    params: SamplingParams
    seed: int
    step: int
    stop_ids: frozenset[int] = frozenset()


@frozen(eq=False)
class StepRow:
    """One sequence's share of a step.

    ``tokens`` follow ``prefix_tokens`` cached ones. ``pending`` says that the only token is the one the step in flight
    samples for this request: the runner takes it from the device, by ``lane``. ``pages`` is the sequence's own growing
    list, only read here; ``pages_version`` grows when an id already in it was replaced. ``sample`` is ``None`` for a
    chunk that does not end its prompt.
    """

    request_id: str
    lane: int
    tokens: Sequence[int]
    prefix_tokens: int
    pages: Sequence[int]
    pages_version: int = 0
    state_slot: int = 0
    pending: bool = False
    sample: SamplingRow | None = None

    @property
    def context_tokens(self) -> int:
        return self.prefix_tokens + len(self.tokens)

    @property
    def decodes(self) -> bool:
        """Whether this is the next token of a request that has had one, not a piece of a prompt (which may also be a
        single token)."""
        return len(self.tokens) == 1 and self.sample is not None and self.sample.step > 0


@frozen(eq=False)
class StepPlan:
    """All rows of a step, and the recurrent-state copies to make before it."""

    rows: tuple[StepRow, ...]
    copies: tuple[StateCopy, ...] = field(default=())

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def sampled(self) -> tuple[StepRow, ...]:
        return tuple(row for row in self.rows if row.sample is not None)


@frozen(eq=False)
class WindowPlan:
    """Chunks of one prompt, in order, that pass a layer together before the next layer starts."""

    chunks: tuple[StepRow, ...]
    copies: tuple[StateCopy, ...] = field(default=())

    @property
    def final(self) -> StepPlan:
        """What stands when the window is done: everything up to the end of its last chunk."""
        return StepPlan(self.chunks[-1:])
