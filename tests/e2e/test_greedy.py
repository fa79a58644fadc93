"""SmolLM2 against transformers in float32, dequantised alike.

Oracle: ``LlamaForCausalLM``, teacher-forced. Greedy tokens are its own exactly when each is the arg max after those
before it, so one forward over prompt and answer checks all 64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

_SPEC = importlib.util.spec_from_file_location("prompts", Path(__file__).with_name("prompts.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
PROMPTS: tuple[str, ...] = _MODULE.PROMPTS
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
EXACT: dict[str, Any] = {"dtype": "float32", "kernel": ("linear=torch", "embedding=torch")}  # weights in float32 too


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), **EXACT, max_seq_len=2048, prefix_cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.encode(p) for p in PROMPTS]


@pytest.fixture(scope="module")
def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """All prompts in one batch: checked against transformers, and then the reference of every other way to run."""
    return [c.token_ids for c in llm.generate(prompts, GREEDY)]


def test_greedy_tokens_equal_transformers(
    answers: list[tuple[int, ...]], prompts: list[list[int]], smollm2_transformers: Any
) -> None:
    for prompt, ours in zip(prompts, answers, strict=True):
        assert len(ours) == 64
        with torch.inference_mode():
            logits = smollm2_transformers(torch.tensor([[*prompt, *ours[:-1]]])).logits[0, len(prompt) - 1 :]
        assert list(ours) == logits.argmax(-1).tolist()


def test_first_token_logprobs_equal_transformers(llm: LLM, prompts: list[list[int]], smollm2_transformers: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    for prompt in prompts:
        ours = llm.generate([prompt], params)[0].logprobs[0]
        with torch.inference_mode():
            theirs = smollm2_transformers(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
        for token, logprob in ours.top:  # type: ignore[attr-defined]
            assert logprob == pytest.approx(theirs[token].item(), abs=1e-3)


def test_plain_runs_give_the_same_tokens(llm: LLM, prompts: list[list[int]], answers: list[tuple[int, ...]]) -> None:
    """Each alone; five of them, since a single stream is slow."""
    for prompt, expected in list(zip(prompts, answers, strict=True))[::4]:
        assert llm.generate([prompt], GREEDY)[0].token_ids == expected


def test_chunked_and_crowded_runs_give_the_same_tokens(
    smollm2_path: Path, prompts: list[list[int]], answers: list[tuple[int, ...]]
) -> None:
    """Chunks of seven tokens, four requests at once, and a cache so small that requests are preempted."""
    with LLM(
        str(smollm2_path), **EXACT, max_seq_len=512, max_prefill_tokens=7, max_running_requests=4, kv_tokens=528
    ) as small:
        assert [c.token_ids for c in small.generate(prompts, GREEDY)] == answers
        assert small.running.built.cache.stats().pages_used == 0


def test_prefix_cached_runs_give_the_same_tokens(
    smollm2_path: Path, prompts: list[list[int]], answers: list[tuple[int, ...]]
) -> None:
    with LLM(str(smollm2_path), **EXACT, max_seq_len=2048) as cached:
        cached.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
        again = cached.generate(prompts, GREEDY)
        assert [c.token_ids for c in again] == answers
        assert sum(c.cached_tokens for c in again) > 0
