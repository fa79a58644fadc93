"""Greedy answers of a model run in the plainest way: the oracle for caches, chunks, batches and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from freetoken.run.sampler import ChosenLogprob
from freetoken.serve.llm import LLM
from freetoken.vocab.sampling import SamplingParams

NEAR_TIE = 1e-3
"""Natural logarithm. Sums in another order may differ by a hundredth of this in float32."""


class PlainAnswers:
    """One request at a time, whole prompts, no prefix cache; remembers what it was asked.

    Answers end before the first token whose lead over the second likeliest is a ``NEAR_TIE``: from there on a batch of
    another shape may rightly differ.
    """

    def __init__(self, model: Path, **options: Any) -> None:
        self._llm = LLM(str(model), prefix_cache=False, dtype="float32", **options)
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._asked: dict[tuple[int, ...], int] = {}

    def answer(self, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The first ``tokens`` greedy tokens after ``prompt``, or fewer."""
        key = tuple(prompt)
        if self._asked.get(key, 0) < tokens:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
            done = self._llm.generate([list(key)], params)[0]
            self._known[key] = done.token_ids[: _clear(done.logprobs)]
            self._asked[key] = tokens
        return self._known[key][:tokens]

    def text(self, prompt: Sequence[int], tokens: int) -> str | None:
        """The same as text; ``None`` where there is a near tie, so that a server may rightly say something else."""
        if len(self.answer(prompt, tokens)) < tokens:
            return None
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return self._llm.generate([list(prompt)], params)[0].text

    def close(self) -> None:
        self._llm.close()

    def __enter__(self) -> PlainAnswers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _clear(logprobs: Sequence[object]) -> int:
    """How many tokens come before the first near tie."""
    for index, chosen in enumerate(logprobs):
        assert isinstance(chosen, ChosenLogprob)
        (_, first), (_, second) = chosen.top
        if first - second < NEAR_TIE:
            return index
    return len(logprobs)
