"""What was measured, as values, and as JSON for scripts."""

from __future__ import annotations

from attrs import frozen

from freetoken.serve.bench.figures import Spread, median


@frozen
class LengthResult:
    """A prompt length that the server had not seen: the first request's time to first token, then further ones'."""

    asked_tokens: int
    prompt_tokens: int
    first_s: float
    again_s: tuple[float, ...]

    @property
    def again_median_s(self) -> float:
        return median(self.again_s)

    @property
    def first_over_again(self) -> float:
        return self.first_s / self.again_median_s

    @property
    def prefill_tok_s(self) -> float:
        return self.prompt_tokens / self.again_median_s

    def as_json(self) -> dict[str, object]:
        return {
            "asked_tokens": self.asked_tokens,
            "prompt_tokens": self.prompt_tokens,
            "first_ttft_s": round(self.first_s, 5),
            "again_ttft_s": round(self.again_median_s, 5),
            "again_ttft_s_each": [round(s, 5) for s in self.again_s],
            "first_over_again": round(self.first_over_again, 2),
            "prefill_tok_s": round(self.prefill_tok_s, 1),
        }


@frozen
class DecodeResult:
    """One stream on an otherwise idle server, several times."""

    prompt_tokens: int
    completion_tokens: int
    tok_s_each: tuple[float, ...]
    gap_s: Spread | None

    @property
    def tok_s(self) -> float:
        return median(self.tok_s_each)

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "tok_s": round(self.tok_s, 2),
            "tok_s_each": [round(v, 2) for v in self.tok_s_each],
            "inter_token_ms": self.gap_s and self.gap_s.as_json(1000),
        }


@frozen
class LoadResult:
    """``streams`` requests at a time until ``requests`` were answered.

    ``out_tok_s`` is all generated tokens over the wall time, prefill included. ``refused`` requests got an error;
    ``first_error`` is what the first of them was told.
    """

    streams: int
    requests: int
    refused: int
    prompt_tokens: int
    completion_tokens: int
    wall_s: float
    ttft_s: Spread | None
    gap_s: Spread | None
    whole_s: Spread | None
    first_error: str = ""

    @property
    def out_tok_s(self) -> float:
        return self.completion_tokens / self.wall_s

    @property
    def all_tok_s(self) -> float:
        """Prompt and generated tokens over the wall time."""
        return (self.prompt_tokens + self.completion_tokens) / self.wall_s

    def as_json(self) -> dict[str, object]:
        return {
            "streams": self.streams,
            "requests": self.requests,
            "refused": self.refused,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "wall_s": round(self.wall_s, 4),
            "out_tok_s": round(self.out_tok_s, 2),
            "all_tok_s": round(self.all_tok_s, 2),
            "ttft_ms": self.ttft_s and self.ttft_s.as_json(1000),
            "inter_token_ms": self.gap_s and self.gap_s.as_json(1000),
            "whole_answer_ms": self.whole_s and self.whole_s.as_json(1000),
            "first_error": self.first_error,
        }


@frozen
class BenchResult:
    """A whole run. ``cached_tokens`` is the most that any answer said its prefix cache held: the template's share."""

    url: str
    model: str
    lengths: tuple[LengthResult, ...] = ()
    decode: DecodeResult | None = None
    load: tuple[LoadResult, ...] = ()
    cached_tokens: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "url": self.url,
            "model": self.model,
            "lengths": [item.as_json() for item in self.lengths],
            "decode": self.decode and self.decode.as_json(),
            "load": [item.as_json() for item in self.load],
            "cached_tokens": self.cached_tokens,
        }
