"""``freetoken.LLM``: what scripts may do with it in any order. Oracle: the same prompts asked plainly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freetoken import LLM, SamplingParams
from freetoken.models import llama
from freetoken.testing.checkpoints import write_tiny
from freetoken.vocab.errors import EngineError, OptionError, UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["the sea", "a hill in the morning", "1, 2, 3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(llama.FAMILY, tmp_path_factory.mktemp("tiny"), seed=6)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", threads=1, max_seq_len=128) as made:
        made.running.core.overlap = request.param
        yield made
        assert made.running.core.idle
        assert made.running.built.cache.stats().pages_used == 0
        assert not made.running.built.engine._sampler._states


def texts(answers: list[Any]) -> list[str]:
    return [answer.text for answer in answers]


def test_text_tokens_one_and_many_are_one_thing(llm: LLM) -> None:
    whole = texts(llm.generate(PROMPTS, GREEDY))
    assert texts([llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]) == whole
    assert texts(llm.generate([llm.tokenizer.encode(p) for p in PROMPTS], GREEDY)) == whole
    assert texts(llm.generate(llm.tokenizer.encode(PROMPTS[0]), GREEDY)) == whole[:1]
    assert ["".join(llm.stream(prompt, GREEDY)) for prompt in PROMPTS] == whole


def test_an_open_stream_and_other_answers_do_not_disturb_each_other(llm: LLM) -> None:
    whole = texts(llm.generate(PROMPTS, GREEDY))
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    pieces = [next(first)]
    others = [next(second), next(second)]
    assert texts(llm.generate(PROMPTS[2], GREEDY)) == whole[2:]
    pieces += list(first)
    assert "".join(pieces) == whole[0]
    assert "".join([*others, *second]) == whole[1]


def test_a_stream_that_is_left_frees_its_request(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.running.core.idle


def test_one_refused_prompt_takes_nothing_with_it(llm: LLM) -> None:
    with pytest.raises(UsageError, match="a prompt of 500 tokens"):
        llm.generate(["fine", [1] * 500], GREEDY)
    assert llm.running.core.idle
    assert llm.generate("fine", GREEDY)[0].finish == "length"
    with pytest.raises(OptionError, match="2 sampling parameters"):
        llm.generate(["fine"], [GREEDY, GREEDY])


def test_a_failed_step_raises_and_the_next_one_is_served(llm: LLM) -> None:
    runner = llm.running.built.engine.runner
    real = runner.run
    runner.run = lambda batch: (_ for _ in ()).throw(RuntimeError("boom"))
    with pytest.raises(EngineError, match="boom"):
        llm.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineError, match="boom"):
        list(llm.stream(PROMPTS[0], GREEDY))
    runner.run = real
    assert llm.generate("fine", GREEDY)[0].finish == "length"


def test_stop_strings_end_an_answer_before_them(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].text
    stop = whole[5:7]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    answer = llm.generate(PROMPTS[0], params)[0]
    assert (answer.text, answer.finish) == (whole[: whole.index(stop)], "stop")
    assert "".join(llm.stream(PROMPTS[0], params)) == answer.text


def test_an_unknown_option_is_named(model: Path) -> None:
    with pytest.raises(OptionError, match="LLM\\(max_seq_length=…\\)"):
        LLM(str(model), max_seq_length=3)
