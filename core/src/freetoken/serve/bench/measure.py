"""The measurements: lengths never seen, one stream, many streams. Each request is salted anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from freetoken.serve.bench.chat import ChatServer, Exchange
from freetoken.serve.bench.figures import Spread
from freetoken.serve.bench.plan import BenchPlan
from freetoken.serve.bench.prompts import PromptWriter
from freetoken.serve.bench.results import BenchResult, DecodeResult, LengthResult, LoadResult
from freetoken.vocab.errors import EngineError

Progress = Callable[[int, int, str], None]
"""Requests answered, requests in all, and what is being measured."""


async def measure(server: ChatServer, writer: PromptWriter, plan: BenchPlan, progress: Progress) -> BenchResult:
    """Everything in ``plan``, in the order lengths, one stream, many. Raises ``EngineError`` when a request fails,
    except under load, where refusals are counted."""
    run = _Run(server, writer, plan, progress)
    lengths = tuple([await run.length(tokens) for tokens in plan.lengths])
    decode = await run.decode() if plan.decode_tokens else None
    load = tuple([await run.load(n) for n in plan.streams]) if plan.decode_tokens else ()
    return BenchResult(str(server.address), server.model, lengths, decode, load, run.cached_tokens)


class _Run:
    def __init__(self, server: ChatServer, writer: PromptWriter, plan: BenchPlan, progress: Progress) -> None:
        self._server, self._writer, self._plan, self._progress = server, writer, plan, progress
        self._done = 0
        self.cached_tokens = 0

    async def length(self, tokens: int) -> LengthResult:
        what = f"prompt of {tokens} tokens"
        first = await self._ask(tokens, 1, what)
        again = [(await self._ask(tokens, 1, what)).ttft_s for _ in range(self._plan.repeats)]
        return LengthResult(tokens, first.prompt_tokens or tokens, first.ttft_s, tuple(again))

    async def decode(self) -> DecodeResult:
        plan = self._plan
        runs = [await self._ask(plan.decode_prompt_tokens, plan.decode_tokens, "1 stream") for _ in range(plan.repeats)]
        speeds = tuple(s for s in (r.decode_tok_s for r in runs) if s is not None)
        if not speeds:
            raise EngineError(
                f"an answer of {plan.decode_tokens} tokens", "the server ended every one after its first token",
                "it may not know ignore_eos; ask for longer answers in your own words with --extra",
            )  # fmt: skip
        gaps = [gap for run in runs for gap in run.gaps_s]
        return DecodeResult(runs[0].prompt_tokens, runs[0].completion_tokens, speeds, Spread.of(gaps))

    async def load(self, streams: int) -> LoadResult:
        """``streams`` workers share the requests; each sends its next one when the last is answered."""
        requests = self._plan.requests_for(streams)
        prompts = [self._writer.write(self._plan.load_prompt_tokens) for _ in range(requests)]
        done: list[Exchange] = []
        errors: list[EngineError] = []
        start = time.perf_counter()
        await asyncio.gather(*(self._worker(prompts, done, errors, f"{streams} streams") for _ in range(streams)))
        wall_s = time.perf_counter() - start
        if not done:
            raise errors[0]
        return _load_result(streams, requests, done, errors, wall_s)

    async def _worker(self, prompts: list[str], done: list[Exchange], errors: list[EngineError], what: str) -> None:
        while prompts:
            text = prompts.pop()
            try:
                done.append(self._seen(await self._server.ask(text, self._plan.decode_tokens)))
            except EngineError as error:
                errors.append(error)
            self._tell(what)

    async def _ask(self, prompt_tokens: int, max_tokens: int, what: str) -> Exchange:
        exchange = self._seen(await self._server.ask(self._writer.write(prompt_tokens), max_tokens))
        self._tell(what)
        return exchange

    def _seen(self, exchange: Exchange) -> Exchange:
        self.cached_tokens = max(self.cached_tokens, exchange.cached_tokens)
        return exchange

    def _tell(self, what: str) -> None:
        self._done += 1
        self._progress(self._done, self._plan.total_requests, what)


def _load_result(
    streams: int, requests: int, done: Sequence[Exchange], errors: Sequence[EngineError], wall_s: float
) -> LoadResult:
    return LoadResult(
        streams=streams,
        requests=requests,
        refused=len(errors),
        prompt_tokens=sum(e.prompt_tokens for e in done),
        completion_tokens=sum(e.completion_tokens for e in done),
        wall_s=wall_s,
        ttft_s=Spread.of([e.ttft_s for e in done]),
        gap_s=Spread.of([gap for e in done for gap in e.gaps_s]),
        whole_s=Spread.of([e.total_s for e in done]),
        first_error=errors[0].refusal.found if errors else "",
    )
