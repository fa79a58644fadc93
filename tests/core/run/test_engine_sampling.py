"""Sampling through the whole engine. Oracles: the request alone, transformers' logits and its processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from freetoken import LLM, SamplingParams
from freetoken.models import llama
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.family import Oracle
from freetoken.testing.transformers_oracle import transformers_oracle
from freetoken.vocab.errors import EngineError, UsageError

CONTEXT = 128
PROMPTS = [[(k * 31 + i * i * 3 + i) % 250 for i in range(6 + 5 * k)] for k in range(10)]
SEEDED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=11, max_tokens=20, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.7, seed=5, max_tokens=24, ignore_eos=True, repetition_penalty=1.4, presence_penalty=0.7,
    frequency_penalty=0.5,
)  # fmt: skip


def wishes(k: int) -> SamplingParams:
    """Every kind of request, one after the other."""
    kinds = (
        SEEDED, PENALISED, evolve(SEEDED, temperature=0.0), evolve(PENALISED, temperature=0.0),
        evolve(SEEDED, logit_bias=((7, 4.0), (9, -100.0)), min_tokens=5), evolve(SEEDED, logprobs=3),
    )  # fmt: skip
    return evolve(kinds[k % len(kinds)], seed=100 + k)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(llama.FAMILY, tmp_path_factory.mktemp("tiny"), seed=2)


def engine(model: Path, **options: Any) -> LLM:
    return LLM(str(model), dtype="float32", threads=1, max_seq_len=CONTEXT, **options)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    with engine(model, prefix_cache=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(plain: LLM) -> list[tuple[int, ...]]:
    return [plain.generate([prompt], wishes(k))[0].token_ids for k, prompt in enumerate(PROMPTS)]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_prefill_tokens": 5, "max_running_requests": 3},
    "preempted": {"kv_tokens": 80, "page_tokens": 4},
}


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("way", WAYS)
def test_seeds_reproduce_in_every_composition(
    model: Path, alone: list[tuple[int, ...]], way: str, overlap: bool
) -> None:
    """Drawn, penalised, biased and greedy requests in one batch; then in the opposite order; each as if alone."""
    with engine(model, **WAYS[way]) as llm:
        llm.running.core.overlap = overlap
        for order in (range(len(PROMPTS)), reversed(range(len(PROMPTS)))):
            numbers = list(order)
            answers = llm.generate([PROMPTS[k] for k in numbers], [wishes(k) for k in numbers])
            assert [a.token_ids for a in answers] == [alone[k] for k in numbers]
        preemptions = llm.running.core.scheduler.preemptions
        assert (preemptions > 0) == (way == "preempted")


def test_other_seeds_draw_other_tokens_and_no_seed_draws_anew(plain: LLM) -> None:
    drawn = {plain.generate([PROMPTS[0]], evolve(SEEDED, seed=seed))[0].token_ids for seed in range(5)}
    assert len(drawn) == 5
    fresh = {c.token_ids for c in plain.generate([PROMPTS[0]] * 5, evolve(SEEDED, seed=None))}
    assert len(fresh) == 5


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return transformers_oracle(model, "LlamaForCausalLM")


def test_logprobs_are_those_of_transformers(plain: LLM, oracle: Oracle) -> None:
    """Of every token, drawn at a temperature: the model's own, before temperature and truncation; within 1e-3."""
    params = evolve(SEEDED, logprobs=5)
    for prompt, answer in zip(PROMPTS, plain.generate(PROMPTS, params), strict=True):
        theirs = oracle([*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :].log_softmax(-1)
        assert len(answer.logprobs) == len(answer.token_ids)
        for row, token, ours in zip(theirs, answer.token_ids, answer.logprobs, strict=True):
            assert ours.token == token  # type: ignore[attr-defined]
            assert ours.logprob == pytest.approx(row[token].item(), abs=1e-3)  # type: ignore[attr-defined]
            best = row.topk(5)
            assert [lp for _, lp in ours.top] == pytest.approx(best.values.tolist(), abs=1e-3)  # type: ignore[attr-defined]


def test_logprobs_do_not_change_with_the_batch_or_the_cache(model: Path, plain: LLM) -> None:
    params = evolve(SEEDED, logprobs=2)
    with engine(model, kv_tokens=80, page_tokens=4) as small:
        for answers in (small.generate(PROMPTS, params), small.generate(PROMPTS, params)):
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                expected = plain.generate([prompt], params)[0]
                assert answer.token_ids == expected.token_ids
                ours = [lp.logprob for lp in answer.logprobs]  # type: ignore[attr-defined]
                theirs = [lp.logprob for lp in expected.logprobs]  # type: ignore[attr-defined]
                assert ours == pytest.approx(theirs, abs=1e-4)


def test_penalties_see_prompt_and_answer_also_after_a_preemption(model: Path, oracle: Oracle) -> None:
    """Oracle: transformers' repetition penalty and the formulas of the OpenAI API over its own logits, greedily."""
    params = evolve(PENALISED, temperature=0.0)
    prompts = PROMPTS[:6]
    with engine(model, kv_tokens=80, page_tokens=4) as small:
        answers = small.generate(prompts, params)
        assert small.running.core.scheduler.preemptions > 0
    repetition = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        for token in answer.token_ids:
            scores = repetition(torch.tensor([ids]), oracle(ids)[-1:])[0]
            counts = torch.bincount(torch.tensor(ids[len(prompt) :], dtype=torch.int64), minlength=len(scores))
            scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
            best = scores.topk(2).values
            if best[0] - best[1] < 1e-3:
                break  # a near tie: from here on both are right
            assert token == int(scores.argmax())
            ids.append(token)
            compared += 1
    assert compared > 100


def test_bias_and_min_tokens(plain: LLM) -> None:
    """A bias of 100 forces a token, here the one that ends the answer; ``min_tokens`` keeps it away until then."""
    forced = SamplingParams(temperature=0, max_tokens=9, logit_bias=((42, 100.0),), stop_token_ids=(42,))
    assert plain.generate([PROMPTS[0]], forced)[0].token_ids == (42,)
    answer = plain.generate([PROMPTS[0]], evolve(forced, min_tokens=4))[0]
    assert answer.finish == "stop"
    assert answer.token_ids[4:] == (42,)
    assert 42 not in answer.token_ids[:4]


def test_the_sampler_forgets_every_request(model: Path) -> None:
    """Also those that ended by a stop string, an abort and an error."""
    with engine(model) as llm:
        llm.generate(PROMPTS, [wishes(k) for k in range(len(PROMPTS))])
        llm.generate([PROMPTS[0]], evolve(PENALISED, stop=("e", "a", "t"), temperature=0.0))
        for _ in llm.stream(PROMPTS[1], PENALISED):
            break
        real = llm.running.built.engine.runner.run
        llm.running.built.engine.runner.run = lambda batch: (_ for _ in ()).throw(RuntimeError("boom"))
        with pytest.raises(EngineError, match="boom"):
            llm.generate([PROMPTS[2]], PENALISED)
        llm.running.built.engine.runner.run = real
        sampler = llm.running.built.engine._sampler
        assert not sampler._states
        assert len(sampler._counts._free) == len(sampler._counts._output)
        assert llm.running.built.cache.stats().pages_used == 0
        with pytest.raises(UsageError, match="vocabulary"):
            llm.generate([PROMPTS[0]], SamplingParams(logit_bias=((100_000, 1.0),)))
        assert llm.generate([PROMPTS[0]], SEEDED)[0].token_ids
