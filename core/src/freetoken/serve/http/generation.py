"""One request's run on the engine: admission, its stream, its choices, its clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from types import TracebackType
from typing import Any

from attrs import evolve, frozen

from freetoken.serve.client import EngineDied
from freetoken.serve.http.choice import Choice, Piece
from freetoken.serve.http.errors import ApiError, ClientGone
from freetoken.serve.http.services import Services
from freetoken.serve.limits import admit
from freetoken.serve.messages import Ready, Submit, TokenLogprob
from freetoken.serve.requestlog import RequestRecord
from freetoken.vocab.sampling import SamplingParams

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@frozen
class Ask:
    """What is to be generated: ``n`` answers to each prompt. ``params.seed`` is the first answer's, the next ones' are
    one higher each, so that equal requests give equal lists of different answers."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    deadline: float | None = None
    continues: bool = False


@frozen
class Answer:
    """A choice that is complete."""

    choice: Choice
    text: str
    logprobs: tuple[TokenLogprob, ...]
    stop_reason: str | int | None


class Generation:
    """Iterate it for ``(choice, piece)``, inside ``with``: leaving the block frees everything at the engine."""

    def __init__(self, services: Services, record: RequestRecord, ask: Ask) -> None:
        """Raises ``ApiError`` 429 when the queue is full and ``EngineUnavailable`` when nothing serves."""
        _admit(services, services.engine.limits(), len(ask.prompts) * ask.n)
        self.choices: dict[str, Choice] = {}
        self._services, self._record, self._ask = services, record, ask
        self._stream = services.engine.submit(self._submits())
        services.traffic.enter(len(self.choices))
        self._since = time.monotonic()
        record.prompt_tokens = sum(map(len, ask.prompts))

    def _submits(self) -> list[Submit]:
        ask, tokenizer = self._ask, self._services.tokenizer
        stop_ids = frozenset(ask.params.stop_token_ids)
        if not ask.params.ignore_eos:
            stop_ids |= self._services.eos_ids
        submits: list[Submit] = []
        for prompt_index, prompt in enumerate(ask.prompts):
            for copy in range(ask.n):
                index = len(submits)
                request_id = self._record.engine_id(index)
                self.choices[request_id] = Choice(index, prompt_index, tokenizer, ask.params, stop_ids, ask.continues)
                submits.append(Submit(request_id, prompt, _seeded(ask.params, copy), ask.deadline))
        return submits

    # ------------------------------------------------------------------------------------------- the run

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stream.close()
        self._services.traffic.leave(len(self.choices), time.monotonic() - self._since)
        self._record.completion_tokens = self.completion_tokens
        self._record.cached_tokens = self.cached_tokens

    async def __aiter__(self) -> AsyncIterator[tuple[Choice, Piece]]:
        choices, stream = self.choices, self._stream
        async for delta in stream:
            choice = choices[delta.request_id]
            if delta.finish == "abort":
                raise EngineDied("this request", "the engine gave it up", "send it again")
            piece = choice.push(delta)
            if delta.tokens:
                self._clock(choice, len(delta.tokens))
            if piece.finish:
                stream.finish(delta.request_id)
                self._record.finish = "deadline" if piece.stop_reason == "deadline" else piece.finish
            yield choice, piece

    async def collect(self, receive: Receive) -> list[Answer]:
        """The whole answer. Raises ``ClientGone`` as soon as the client hangs up."""
        texts: dict[int, list[str]] = {choice.index: [] for choice in self.choices.values()}
        logprobs: dict[int, list[TokenLogprob]] = {index: [] for index in texts}
        reasons: dict[int, str | int | None] = {}
        with self.watch(receive):
            async for choice, piece in self:
                texts[choice.index].append(piece.text)
                logprobs[choice.index].extend(piece.logprobs)
                if piece.finish:
                    reasons[choice.index] = piece.stop_reason
        ordered = sorted(self.choices.values(), key=lambda c: c.index)
        return [Answer(c, "".join(texts[c.index]), tuple(logprobs[c.index]), reasons.get(c.index)) for c in ordered]

    def watch(self, receive: Receive) -> HangUpWatch:
        """While it is entered, a client that hangs up ends the iteration with ``ClientGone``."""
        return HangUpWatch(receive, self._stream.fail)

    def _clock(self, choice: Choice, tokens: int) -> None:
        now = time.monotonic()
        metrics = self._services.metrics
        last, choice.last_token = choice.last_token, now
        if last is not None:
            for _ in range(tokens):
                metrics.token_gap.observe((now - last) / tokens)
        elif self._record.first_token is None:
            self._record.first_token = now
            metrics.ttft.observe(now - self._record.started)

    # ------------------------------------------------------------------------------------------- the bill

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices.values())

    @property
    def cached_tokens(self) -> int:
        """Of every prompt what the cache held for its first answer; the further answers always share the prompt."""
        return sum(choice.cached_tokens for choice in self.choices.values() if choice.index % self._ask.n == 0)

    def usage(self) -> dict[str, object]:
        """Prompts count once however many answers each got."""
        prompt, completion = self._record.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class HangUpWatch:
    """Waits for the connection's ``http.disconnect`` beside the work, and reports it."""

    def __init__(self, receive: Receive, report: Callable[[Exception], None]) -> None:
        self._receive = receive
        self._report = report

    def __enter__(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._wait())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._report(ClientGone())


def _admit(services: Services, ready: Ready, sequences: int) -> None:
    decision = admit(services.limits, services.traffic.load(), sequences, ready.max_running_requests)
    if not decision.taken:
        message = f"the server is busy: {decision.reason}; try again in {decision.retry_after_s} s"
        raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(decision.retry_after_s)})


def _seeded(params: SamplingParams, copy: int) -> SamplingParams:
    if params.seed is None or copy == 0:
        return params
    # Wrapped into 64 bits, as the seed itself is checked to be.
    return evolve(params, seed=(params.seed + copy + 2**63) % 2**64 - 2**63)


def token_text(services: Services, token_ids: Sequence[int]) -> list[str]:
    """Each token on its own, as ``logprobs`` names it; half a character becomes U+FFFD."""
    return [services.tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]
