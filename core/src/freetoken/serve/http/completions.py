"""``POST /v1/completions``: text or token ids, continued."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from freetoken.serve.http.body import parse_body, read_body
from freetoken.serve.http.chat import finite
from freetoken.serve.http.choice import Choice, Piece
from freetoken.serve.http.errors import ApiError
from freetoken.serve.http.generation import Ask, Generation, token_text
from freetoken.serve.http.models import check_model
from freetoken.serve.http.prompts import check_not_empty, split_prompts, text_prompts
from freetoken.serve.http.request_models import CompletionBody
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

DEFAULT_MAX_TOKENS = 16  # the API's own for this endpoint


async def completions(request: Request) -> Response:
    """Continue a text, at once or as a stream."""
    services, record = services_of(request), record_of(request)
    body = parse_body(await read_body(request, services.limits.max_body_bytes), CompletionBody)
    check_model(services, body.model)
    usage_wanted = check_stream_options(body)
    if body.echo and body.logprobs is not None:
        message = "echo with logprobs is not implemented: the prompt's log-probabilities are not computed"
        raise ApiError(400, message, param="echo", code="not_implemented")
    sent = split_prompts(body.prompt)
    ask = await _ask(services, body, sent)
    echoes = _echoes(services, sent) if body.echo else [""] * len(ask.prompts)
    generation = Generation(services, record, ask)
    head = _Head(services, f"cmpl-{record.request_id}", body.logprobs is not None)
    record.stream = bool(body.stream)
    if body.stream:
        return StreamedAnswer(generation, _events(generation, head, usage_wanted, echoes), record)
    with generation:
        answers = await generation.collect(request.receive)
    choices = [
        head.choice(answer.choice, echoes[answer.choice.prompt_index],
                    Piece(answer.text, answer.logprobs, answer.choice.finish, answer.stop_reason))
        for answer in answers
    ]  # fmt: skip
    return JSONResponse(head.answer(choices) | {"usage": generation.usage()})


async def _ask(services: Services, body: CompletionBody, sent: Sequence[str | list[int]]) -> Ask:
    limits, deadline = services.engine.limits(), deadline_of(body, services.limits.request_timeout_s)
    sampling_params(body, services.defaults, limits, body.max_tokens or limits.max_seq_tokens, body.logprobs)
    n = choices_of(body, len(sent), services.limits.max_choices)
    prompts = await text_prompts(services, sent)
    check_not_empty(prompts, "prompt")
    # One set of parameters serves all prompts, so the longest decides.
    max_tokens = max_new_tokens(body.max_tokens, max(map(len, prompts)), limits, DEFAULT_MAX_TOKENS)
    params = sampling_params(body, services.defaults, limits, max_tokens, body.logprobs)
    return Ask(tuple(prompts), params, n, deadline, continues=True)


def _echoes(services: Services, sent: Sequence[str | list[int]]) -> list[str]:
    """The prompts as text: as sent, or what the token ids stand for."""
    decode = services.tokenizer.decode
    return [item if isinstance(item, str) else decode(item, skip_special=False) for item in sent]


async def _events(
    generation: Generation, head: _Head, usage_wanted: bool, echoes: Sequence[str]
) -> AsyncIterator[bytes]:
    """Per choice: the echo with the first token, one chunk a token, the finish reason in the last; usage if wanted."""
    rest: dict[str, object] = {"usage": None} if usage_wanted else {}
    templates = {
        choice.index: ChunkTemplate(head.answer([head.choice(choice, ChunkTemplate.hole(), Piece(""))]) | rest)
        for choice in generation.choices.values()
    }
    async for choice, piece in generation:
        echo = "" if choice.seen else echoes[choice.prompt_index]
        choice.seen = True
        if piece.logprobs or piece.finish:
            yield event(head.answer([head.choice(choice, echo, piece)]) | rest)
        elif echo or piece.text:
            yield templates[choice.index].fill(echo + piece.text)
    if usage_wanted:
        yield event(head.answer([]) | {"usage": generation.usage()})


class _Head:
    """What all chunks of an answer share, and how its objects look."""

    def __init__(self, services: Services, answer_id: str, logprobs: bool) -> None:
        self._services = services
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}
        self._shared = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": services.served_name,
        }

    def answer(self, choices: Sequence[object]) -> dict[str, object]:
        return {**self._shared, "choices": choices}

    def choice(self, choice: Choice, echo: str, piece: Piece) -> dict[str, object]:
        part = {
            "index": choice.index,
            "text": echo + piece.text,
            "logprobs": self._entries(choice.index, piece) if self._logprobs else None,
            "finish_reason": piece.finish or None,
        }
        return part | ({"stop_reason": piece.stop_reason} if piece.finish else {})

    def _entries(self, index: int, piece: Piece) -> dict[str, object]:
        texts = token_text(self._services, [entry.token for entry in piece.logprobs])
        offset = self._offsets.get(index, 0)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [finite(entry.logprob) for entry in piece.logprobs],
            "top_logprobs": [self._top(entry) for entry in piece.logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """By text, the likelier of two tokens that read alike."""
        top: dict[str, float] = {}
        names = token_text(self._services, [token for token, _ in entry.top])
        for name, (_, logprob) in zip(names, entry.top, strict=True):
            top.setdefault(name, finite(logprob))
        return top
