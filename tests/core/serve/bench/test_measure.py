"""A whole run against a served fake engine. Oracle: what the fake engine was told to answer, and its tokenizer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.serve.bench.chat import ChatServer, Exchange
from freetoken.serve.bench.http import Address
from freetoken.serve.bench.measure import measure
from freetoken.serve.bench.plan import BenchPlan
from freetoken.serve.bench.prompts import PromptWriter
from freetoken.serve.bench.results import BenchResult
from freetoken.vocab.errors import EngineError, UsageError

sys.path.insert(0, str(Path(__file__).parents[1]))
from serve_bench import Served, serve

PLAN = BenchPlan(
    lengths=(60, 333), repeats=2, decode_tokens=11, decode_prompt_tokens=70, streams=(1, 4), load_prompt_tokens=80
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


def run(
    served: Served, plan: BenchPlan, told: list[tuple[int, int, str]] | None = None, **extra: object
) -> BenchResult:
    async def all_of_it() -> BenchResult:
        server = await ChatServer.find(Address.parse(served.base), None, {"ignore_eos": True, **extra}, None, 30)
        writer = await PromptWriter.for_server(server, seed=1)
        return await measure(server, writer, plan, lambda *news: told.append(news) if told is not None else None)

    return asyncio.run(all_of_it())


def test_everything_planned_is_measured(served: Served) -> None:
    told: list[tuple[int, int, str]] = []
    before = served.counter("submits")
    result = run(served, PLAN, told)
    assert [item.prompt_tokens for item in result.lengths] == [60, 333]  # bytes are tokens, so lengths are exact
    assert all(len(item.again_s) == 2 and item.first_s > 0 for item in result.lengths)
    assert result.decode is not None
    assert (result.decode.prompt_tokens, result.decode.completion_tokens) == (70, 11)
    assert [(item.streams, item.requests, item.refused) for item in result.load] == [(1, 2, 0), (4, 8, 0)]
    assert [item.completion_tokens for item in result.load] == [22, 88]
    assert [item.prompt_tokens for item in result.load] == [160, 640]
    assert all(item.ttft_s is not None and item.ttft_s.count == item.requests for item in result.load)
    assert told[-1][:2] == (PLAN.total_requests, PLAN.total_requests)
    assert [done for done, _, _ in told] == list(range(1, PLAN.total_requests + 1))
    assert served.counter("submits") - before == PLAN.total_requests
    assert result.model == "fake/model"


def test_prompts_share_nothing_but_the_template(served: Served) -> None:
    """Property: from the first letter on, two prompts of one length differ early."""

    async def written() -> list[str]:
        server = await ChatServer.find(Address.parse(served.base), None, {}, None, 30)
        writer = await PromptWriter.for_server(server)
        return [writer.write(200) for _ in range(20)]

    texts = asyncio.run(written())
    assert len({text[:16] for text in texts}) == 20
    assert {len(text) for text in texts} == {len(texts[0])}


def test_lengths_can_be_learned_without_a_tokenize_endpoint(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same run with the endpoint."""

    async def refuse(*_: object) -> object:
        raise EngineError("POST /tokenize", "HTTP 404: not here")

    monkeypatch.setattr(ChatServer, "post", refuse)
    result = run(served, BenchPlan(lengths=(123,), repeats=1, decode_tokens=0))
    assert result.lengths[0].prompt_tokens == 123
    assert result.decode is None
    assert result.load == ()


def test_refusals_under_load_are_counted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: every second request is made to fail."""
    answered, asked = ChatServer.ask, iter(range(100))

    async def ask(server: ChatServer, text: str, max_tokens: int) -> Exchange:
        if next(asked) % 2:
            raise EngineError("this request", "HTTP 429: full")
        return await answered(server, text, max_tokens)

    monkeypatch.setattr(ChatServer, "ask", ask)
    plan = BenchPlan(lengths=(), repeats=1, decode_tokens=3, streams=(2,), requests=6, load_prompt_tokens=70)
    (load,) = run(served, plan).load
    assert (load.requests, load.refused, load.completion_tokens) == (6, 3, 9)
    assert load.first_error == "HTTP 429: full"


def test_a_load_that_is_refused_whole_ends_the_run(served: Served) -> None:
    """A prompt longer than the context is refused by the server, whatever the stream."""
    plan = BenchPlan(lengths=(), repeats=1, decode_tokens=3, streams=(2,), load_prompt_tokens=5000)
    with pytest.raises(EngineError, match="HTTP 4"):
        run(served, plan)


def test_a_prompt_shorter_than_the_template_is_refused(served: Served) -> None:
    with pytest.raises(UsageError, match="chat template"):
        run(served, BenchPlan(lengths=(3,), repeats=1, decode_tokens=0))


def test_a_failing_request_ends_the_run_outside_load(served: Served) -> None:
    with pytest.raises(EngineError, match="HTTP 400"):
        run(served, BenchPlan(lengths=(100,), repeats=1, decode_tokens=0), temperature=-3)
