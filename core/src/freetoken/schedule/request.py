"""A request as the scheduler keeps it, from arrival to its last token."""

from __future__ import annotations

from attrs import define

from freetoken.kv.manager import SequenceCache
from freetoken.vocab.sampling import SamplingParams


@define(eq=False)
class ScheduledRequest:
    """``tokens`` are the prompt and what was generated and read.

    ``scheduled`` counts tokens that a step was launched for; ``unread`` those that steps in flight sample. ``lane``
    is the request's place in the runner's per-lane buffers while it runs, else −1.
    """

    request_id: str
    num_prompt: int
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    tokens: list[int]
    deadline: float | None = None
    cache: SequenceCache | None = None
    lane: int = -1
    scheduled: int = 0
    unread: int = 0
    first_cached: int = -1
    snapshot_due: bool = False

    @property
    def num_generated(self) -> int:
        """Tokens generated and read."""
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Tokens there will be once the steps in flight are read."""
        return len(self.tokens) + self.unread

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.length - self.scheduled

    @property
    def decoding(self) -> bool:
        """Its next step is one token that follows what it generated."""
        length = len(self.tokens) + self.unread
        return length - self.scheduled == 1 and length > self.num_prompt

    @property
    def prefilling(self) -> bool:
        """It has tokens to compute that are not just the one that follows what it generated."""
        length = len(self.tokens) + self.unread
        todo = length - self.scheduled
        return todo > 1 or (todo == 1 and length <= self.num_prompt)

    @property
    def will_end(self) -> bool:
        """The step in flight samples its last token by length, so that no further one should be launched."""
        return self.num_generated + self.unread >= self.max_tokens
