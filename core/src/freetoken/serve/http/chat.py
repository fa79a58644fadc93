"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from freetoken.serve.http.body import parse_body, read_body
from freetoken.serve.http.choice import Choice, Piece
from freetoken.serve.http.errors import ApiError
from freetoken.serve.http.generation import Answer, Ask, Generation
from freetoken.serve.http.models import check_model
from freetoken.serve.http.prompts import chat_prompt, check_not_empty
from freetoken.serve.http.request_models import ChatBody
from freetoken.serve.http.sampling import (
    check_stream_options,
    choices_of,
    deadline_of,
    max_new_tokens,
    sampling_params,
)
from freetoken.serve.http.services import Services, record_of, services_of
from freetoken.serve.http.streaming import StreamedAnswer
from freetoken.serve.messages import TokenLogprob
from freetoken.serve.sse import ChunkTemplate, event


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    services, record = services_of(request), record_of(request)
    body = parse_body(await read_body(request, services.limits.max_body_bytes), ChatBody)
    check_model(services, body.model)
    usage_wanted = check_stream_options(body)
    ask = await _ask(services, body)
    generation = Generation(services, record, ask)
    head = _Head(services, f"chatcmpl-{record.request_id}", bool(body.stream), ask.params.logprobs is not None)
    record.stream = bool(body.stream)
    if body.stream:
        return StreamedAnswer(generation, _events(generation, head, usage_wanted), record)
    with generation:
        answers = await generation.collect(request.receive)
    choices = [head.whole(answer) for answer in answers]
    return JSONResponse(head.answer(choices) | {"usage": generation.usage()})


async def _ask(services: Services, body: ChatBody) -> Ask:
    limits = services.engine.limits()
    n = choices_of(body, 1, services.limits.max_choices)
    deadline, logprobs, asked = deadline_of(body, services.limits.request_timeout_s), _logprobs(body), _max_tokens(body)
    # Checked before the prompt is made, and again with the numbers: a bad field should not cost a tokenization.
    sampling_params(body, services.defaults, limits, asked or limits.max_seq_tokens, logprobs)
    prompt = await chat_prompt(services, body.messages, body.chat_template_kwargs)
    check_not_empty([prompt], "messages")
    max_tokens = max_new_tokens(asked, len(prompt), limits)
    return Ask((prompt,), sampling_params(body, services.defaults, limits, max_tokens, logprobs), n, deadline)


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"max_tokens={old} contradicts max_completion_tokens={new}; send one of them"
        raise ApiError(400, message, param="max_tokens", code="invalid_value")
    return new if new is not None else old


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        message = "top_logprobs is for logprobs=true only"
        raise ApiError(400, message, param="top_logprobs", code="invalid_value")
    return (body.top_logprobs or 0) if body.logprobs else None


async def _events(generation: Generation, head: _Head, usage_wanted: bool) -> AsyncIterator[bytes]:
    """Per choice: one chunk with the role, one a token, one with the finish reason; usage last if wanted."""
    rest: dict[str, object] = {"usage": None} if usage_wanted else {}
    templates = {
        choice.index: ChunkTemplate(head.answer([head.part(choice, {"content": ChunkTemplate.hole()})]) | rest)
        for choice in generation.choices.values()
    }
    async for choice, piece in generation:
        data = b""
        if not choice.seen:
            choice.seen = True
            data = event(head.answer([head.part(choice, {"role": "assistant", "content": ""})]) | rest)
        if piece.logprobs:
            data += event(head.answer([head.part(choice, {"content": piece.text}, piece)]) | rest)
        elif piece.text:
            data += templates[choice.index].fill(piece.text)
        if piece.finish:
            data += event(head.answer([head.part(choice, {}, Piece("", (), *piece[2:]))]) | rest)
        if data:
            yield data
    if usage_wanted:
        yield event(head.answer([]) | {"usage": generation.usage()})


class _Head:
    """What all chunks of an answer share, and how its objects look."""

    def __init__(self, services: Services, answer_id: str, stream: bool, logprobs: bool) -> None:
        self._services = services
        self._logprobs = logprobs
        self._shared = {
            "id": answer_id,
            "object": "chat.completion.chunk" if stream else "chat.completion",
            "created": int(time.time()),
            "model": services.served_name,
        }

    def answer(self, choices: Sequence[object]) -> dict[str, object]:
        return {**self._shared, "choices": choices}

    def part(self, choice: Choice, delta: dict[str, object], piece: Piece = Piece("")) -> dict[str, object]:
        part = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._entries(piece.logprobs) if piece.logprobs else None,
            "finish_reason": piece.finish or None,
        }
        return part | ({"stop_reason": piece.stop_reason} if piece.finish else {})

    def whole(self, answer: Answer) -> dict[str, object]:
        return {
            "index": answer.choice.index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": self._entries(answer.logprobs) if self._logprobs else None,
            "finish_reason": answer.choice.finish,
            "stop_reason": answer.stop_reason,
        }

    def _entries(self, logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
        entries = []
        for chosen in logprobs:
            entry = self._entry(chosen.token, chosen.logprob)
            entry["top_logprobs"] = [self._entry(token, value) for token, value in chosen.top]
            entries.append(entry)
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        data = self._services.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """JSON has no infinity; the API's word for "impossible" is -9999."""
    return max(logprob, -9999.0)
