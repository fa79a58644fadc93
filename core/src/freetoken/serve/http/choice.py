"""One choice of an answer as it grows: deltas in, text out, stop strings looked for."""

from __future__ import annotations

from typing import NamedTuple

from freetoken.serve.messages import Delta, TokenLogprob
from freetoken.serve.text import IncrementalDetokenizer, StopStrings, TextTokenizer
from freetoken.vocab.sampling import SamplingParams


class Piece(NamedTuple):
    """What one delta adds to a choice. ``finish`` is ``""`` while it runs; ``stop_reason`` is the stop string or token
    id that ended it, or ``"deadline"``."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str = ""
    stop_reason: str | int | None = None


class Choice:
    """``index`` is its place in ``choices``; ``prompt_index`` says which prompt it answers. ``stop_ids`` are the tokens
    that end it at the engine; they are no part of the text. ``continues``: the text goes on from the prompt's."""

    __slots__ = (
        "_detokenizer", "_logprobs", "_min_tokens", "_stop_ids", "_stops", "cached_tokens", "completion_tokens",
        "finish", "index", "last_token", "prompt_index", "seen",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        prompt_index: int,
        tokenizer: TextTokenizer,
        params: SamplingParams,
        stop_ids: frozenset[int],
        continues: bool,
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish = ""
        self.seen = False  # for the writer: whether something of this choice has been sent
        self.last_token: float | None = None  # for the clock
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues=continues)
        self._stops = StopStrings(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._stop_ids = stop_ids
        self._logprobs: tuple[TokenLogprob, ...] = ()

    def push(self, delta: Delta) -> Piece:
        """The text that is safe to send. Log-probabilities wait for the text of their tokens."""
        tokens = delta.tokens
        self.completion_tokens += len(tokens)
        if delta.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if not delta.finish and self._stops is None and not delta.logprobs:
            return Piece(self._detokenizer.push(tokens))
        return self._push_all(delta)

    def _push_all(self, delta: Delta) -> Piece:
        tokens, logprobs, ended_by = delta.tokens, delta.logprobs, None
        if delta.finish == "stop" and tokens and tokens[-1] in self._stop_ids:
            ended_by, tokens, logprobs = tokens[-1], tokens[:-1], logprobs[: len(tokens) - 1]
        text = self._detokenizer.push(tokens)
        if delta.finish:
            text += self._detokenizer.flush()
        text, matched = self._past_stops(text, last=bool(delta.finish))
        logprobs = self._logprobs + logprobs
        if matched is not None:
            return self._ended(text, logprobs, "stop", matched)
        if delta.finish:
            return self._ended(text, logprobs, *_reason(delta.finish, ended_by))
        self._logprobs = () if text else logprobs
        return Piece(text, logprobs if text else ())

    def _past_stops(self, text: str, last: bool) -> tuple[str, str | None]:
        # The first min_tokens tokens may spell a stop string; they do not stop the answer.
        if self._stops is None or self.completion_tokens < self._min_tokens:
            return text, None
        text, matched = self._stops.push(text)
        return (text + self._stops.flush() if last and matched is None else text), matched

    def _ended(self, text: str, logprobs: tuple[TokenLogprob, ...], finish: str, reason: str | int | None) -> Piece:
        self.finish = finish
        return Piece(text, logprobs, finish, reason)


def _reason(finish: str, ended_by: int | None) -> tuple[str, str | int | None]:
    """The engine's word as the API has it: it knows no ``deadline``, so that is a ``length`` with its reason beside."""
    return ("length", "deadline") if finish == "deadline" else (finish, ended_by)
