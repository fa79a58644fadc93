"""How many prompt tokens a step may compute, so that running requests keep getting tokens. Arithmetic alone.

What a step will cost is bounded from the steps before it: decodes cost at most their share for each row, and a prompt
token at most what the last ones cost, times the growth of its context (attention grows with it, all else stays).
"""

from __future__ import annotations

from math import sqrt

from attrs import define

_KEPT = 0.7  # of the past, with each new step
_MARGIN = 0.8  # of the gap: a step may turn out slower than those before
_LEAST_MS = 0.001


@define
class StepSpeed:
    """Measured speed of steps. ``decode_ms``: the last step without prompt tokens, of ``decode_rows`` requests; 0 until
    there was one.

    The milliseconds that a prompt token adds are a decayed sum of times over a decayed sum of tokens, so that large
    chunks, whose fixed cost is spread over many tokens, count for more than the few tokens at the end of a prompt.
    Where the last chunk was slower, it counts alone.
    """

    decode_ms: float = 0.0
    decode_rows: int = 0
    _ms: float = 0.0
    _tokens: float = 0.0
    _last: float = 0.0
    _context: float = 1.0  # at the end of the last chunk

    @property
    def measured(self) -> bool:
        """Whether both kinds of step were seen."""
        return self._tokens > 0 and self.decode_rows > 0

    @property
    def ms_per_token(self) -> float:
        """Of a prompt, at the context of the last chunk; 0 until measured."""
        return max(self._ms / self._tokens, self._last, _LEAST_MS) if self._tokens else 0.0

    def observe(self, prefill_tokens: int, decode_rows: int, ms: float, context_tokens: float) -> None:
        """Take one step into account; ``context_tokens`` is the mean over its prompt tokens."""
        if prefill_tokens == 0:
            if decode_rows:
                self.decode_ms, self.decode_rows = ms, decode_rows
            return
        if decode_rows and not self.decode_rows and self._tokens:
            self.decode_ms, self.decode_rows = max(ms - prefill_tokens * self.ms_per_token, _LEAST_MS), decode_rows
        # Of the decodes only what is certain is taken off: as if further rows cost nothing.
        share = min(1.0, decode_rows / self.decode_rows) if self.decode_rows else 0.0
        rest = max(ms - share * self.decode_ms, 0.0)
        self._ms = _KEPT * self._ms + rest
        self._tokens = _KEPT * self._tokens + prefill_tokens
        self._last = rest / prefill_tokens
        self._context = max(context_tokens, 1.0)

    def decodes_ms(self, rows: int) -> float:
        """The most that ``rows`` decodes should take: each row at its full share."""
        return self.decode_ms * max(1.0, rows / self.decode_rows) if self.decode_rows else 0.0

    def chunk_ms(self, tokens: int, prefix_tokens: int) -> float:
        """The most that ``tokens`` after ``prefix_tokens`` should take."""
        return tokens * self.ms_per_token * max(1.0, (prefix_tokens + tokens) / self._context)

    def tokens_within(self, ms: float, prefix_tokens: int) -> int:
        """The most tokens whose ``chunk_ms`` is within ``ms``."""
        if ms <= 0:
            return 0
        flat = ms / self.ms_per_token
        if prefix_tokens + flat <= self._context:
            return int(flat)
        # tokens · (prefix + tokens) = flat · context
        return int((sqrt(prefix_tokens**2 + 4 * flat * self._context) - prefix_tokens) / 2)


@define
class StepBudget:
    """What is left of a step for prompts: ``tokens``, and ``ms`` where somebody waits for its end (else ``None``)."""

    tokens: int
    ms: float | None
    speed: StepSpeed
    page_tokens: int
    _begun: bool = False

    @property
    def open(self) -> bool:
        return self.allowed(0) > 0

    def allowed(self, prefix_tokens: int) -> int:
        """Tokens that a chunk after ``prefix_tokens`` may have. The step's first chunk gets a page whatever it costs,
        or its prompt would never end; before both kinds of step were measured that is all."""
        if self.ms is None:
            return self.tokens
        affordable = self.speed.tokens_within(self.ms, prefix_tokens) if self.speed.measured else 0
        return min(self.tokens, max(affordable, 0 if self._begun else self.page_tokens))

    def take(self, tokens: int, prefix_tokens: int) -> None:
        """A chunk was given ``tokens``."""
        self.tokens -= tokens
        self._begun = True
        if self.ms is not None:
            self.ms -= self.speed.chunk_ms(tokens, prefix_tokens)


def step_budget(max_tokens: int, decodes: int, speed: StepSpeed, max_gap_ms: float, page_tokens: int) -> StepBudget:
    """For a step of at most ``max_tokens`` with ``decodes`` running requests, which should get their next token within
    ``max_gap_ms``."""
    ms = _MARGIN * max_gap_ms - speed.decodes_ms(decodes) if decodes else None
    return StepBudget(max(max_tokens - decodes, 0), ms, speed, page_tokens)
