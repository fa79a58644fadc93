"""How a request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import Attribute, field, frozen

from freetoken.vocab.errors import UsageError

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20


def _between(low: float, high: float) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(_: object, attribute: Attribute[Any], value: float) -> None:
        if not low <= value <= high:
            raise UsageError(f"{attribute.name}={value!r}", f"it must lie between {low:g} and {high:g}")

    return check


@frozen
class SamplingParams:
    """Validated on construction; raises ``UsageError`` naming the field.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``max_tokens`` ``None`` means "to the
    end of the context". ``seed`` ``None`` draws one per request.
    """

    temperature: float = field(default=1.0, validator=_between(0, 2))
    top_k: int = field(default=0, validator=_between(0, 2**31 - 1))
    top_p: float = field(default=1.0, validator=_between(0, 1))
    min_p: float = field(default=0.0, validator=_between(0, 1))
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = field(default=0, validator=_between(0, 2**31 - 1))
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = field(default=0.0, validator=_between(-2, 2))
    frequency_penalty: float = field(default=0.0, validator=_between(-2, 2))
    repetition_penalty: float = field(default=1.0, validator=_between(0.01, 10))
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None: none; 0: the chosen token's; n: with the n likeliest

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens={self.max_tokens}", "it must be at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens={self.min_tokens}", f"max_tokens is only {self.max_tokens}")
        if self.top_p == 0:
            raise UsageError("top_p=0", "no token would be left", "use temperature=0 for greedy decoding")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise UsageError(f"{len(self.stop)} stop strings", f"at most {MAX_STOP_STRINGS} are taken")
        if not all(self.stop):
            raise UsageError("an empty stop string", "it would stop before the first token")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise UsageError(f"top_logprobs={self.logprobs}", f"it must lie between 0 and {MAX_TOP_LOGPROBS}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed}", "it must fit in 64 bits")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def route(self) -> str:
        """``"fast"``: one kernel over per-row tensors. ``"full"``: penalties, bias and logprobs, which read history."""
        plain = (
            self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.repetition_penalty == 1
            and not self.logit_bias
            and self.logprobs is None
            and self.min_tokens == 0
        )
        return "fast" if plain else "full"


SAMPLER_ROUTES = ("fast", "full")
