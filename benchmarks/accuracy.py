"""How far one way of computing a model's logits lies from another, over the same tokens (teacher forcing)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from freetoken.testing.fakes import make_batch

Logits = Callable[[Sequence[int]], Tensor]
"""Tokens of one sequence → logits ``[T, V]`` float32."""

PROMPTS = (
    "What is the capital of France?", "Write a haiku about the sea.", "Name three prime numbers and say why.",
    "Translate 'good morning' into Spanish and Italian.", "def fibonacci(n):", "Once upon a time, by the river,",
    "Explain photosynthesis to a child.", "1, 1, 2, 3, 5, 8,", "Which is heavier, iron or feathers?",
    "The quick brown fox jumps over the lazy dog.", "Summarise: the cat sat on the red mat and slept.",
    "SELECT name, count(*) FROM users GROUP BY", "A recipe for pancakes, please.",
    "What happens when baking soda meets vinegar?", "Lists and tuples in Python: what is the difference?",
    "Tell me a joke about computers.", "The planets in order from the sun:", "Il était une fois une princesse qui",
    "How many minutes are there in a week?", "Who wrote Don Quixote, and when?",
)  # fmt: skip
ANSWER_TOKENS = 64


@frozen
class Agreement:
    """Over ``tokens`` positions: the share with one arg max, and the mean Kullback-Leibler divergence in nats."""

    tokens: int
    top1: float
    mean_kl: float
    worst_kl: float


def compare(reference: Logits, other: Logits, texts: Sequence[tuple[Sequence[int], int]]) -> Agreement:
    """``texts`` are token sequences and how many of their last positions to look at; KL is that of ``other`` from
    ``reference``: Σ p (ln p − ln q)."""
    same, divergences = 0, []
    for tokens, positions in texts:
        p, q = (torch.log_softmax(f(tokens)[-positions:].double(), -1) for f in (reference, other))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        divergences.append((p.exp() * (p - q)).sum(-1))
    all_kl = torch.cat(divergences)
    return Agreement(len(all_kl), same / len(all_kl), float(all_kl.mean()), float(all_kl.max()))


def freetoken_logits(llm: Any) -> Logits:
    """Every position's logits of an idle ``LLM``: one prefill step on pages that nobody holds."""
    built = llm.running.built
    page_tokens, runner = built.sizing.page_tokens, built.engine.runner

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> Tensor:
        batch = make_batch((len(tokens),), (0,), page_tokens, contiguous=True)
        batch = evolve(batch, tokens=torch.tensor(list(tokens)), logit_rows=torch.arange(len(tokens)))
        result: Tensor = runner.run(batch)
        return result

    return logits


def answers(llm: Any, prompts: Sequence[str] = PROMPTS, tokens: int = ANSWER_TOKENS) -> list[tuple[list[int], int]]:
    """The model's own greedy answers to chat prompts, as ``compare`` takes them."""
    from freetoken.vocab.sampling import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    done = [llm.chat([{"role": "user", "content": prompt}], params) for prompt in prompts]
    return [([*a.prompt_token_ids, *a.token_ids[:-1]], tokens) for a in done]
