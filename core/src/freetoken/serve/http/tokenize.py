"""``POST /tokenize`` and ``POST /detokenize``: the served model's tokenizer."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from freetoken.serve.http.body import parse_body, read_body
from freetoken.serve.http.errors import ApiError
from freetoken.serve.http.generation import token_text
from freetoken.serve.http.models import check_model
from freetoken.serve.http.prompts import chat_prompt, encode
from freetoken.serve.http.request_models import DetokenizeBody, TokenizeBody
from freetoken.serve.http.services import Services, services_of


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of messages as the chat endpoint would send them."""
    services = services_of(request)
    body = parse_body(await read_body(request, services.limits.max_body_bytes), TokenizeBody)
    check_model(services, body.model)
    tokens = await _tokens(services, body)
    ready = services.engine.status.ready
    answer: dict[str, object] = {"count": len(tokens), "tokens": list(tokens)}
    answer["max_model_len"] = None if ready is None else ready.max_seq_tokens
    if body.return_token_strs:
        answer["token_strs"] = token_text(services, tokens)
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    services = services_of(request)
    body = parse_body(await read_body(request, services.limits.max_body_bytes), DetokenizeBody)
    check_model(services, body.model)
    services.tokenizer.check_ids(body.tokens)
    return JSONResponse({"text": services.tokenizer.decode(body.tokens, bool(body.skip_special_tokens))})


async def _tokens(services: Services, body: TokenizeBody) -> tuple[int, ...]:
    if (body.text is None) == (body.messages is None):
        raise ApiError(400, "send either text or messages", param="text", code="invalid_value")
    if body.text is not None:
        return await encode(services, body.text, body.add_special_tokens is not False)
    return await chat_prompt(services, body.messages or [], body.chat_template_kwargs)
