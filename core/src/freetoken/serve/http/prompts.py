"""What a request wants the model to read: messages or prompts in, token ids out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from freetoken.serve.http.errors import ApiError
from freetoken.serve.http.request_models import ChatMessage
from freetoken.serve.http.services import Services

T = TypeVar("T")

# Longer texts are tokenized in a thread, so that other requests' tokens keep flowing: about 10 ms of tokenizing.
_INLINE_CHARS = 16_384
_RESERVED_KWARGS = ("messages", "tools")
_GAPS = ("tool_calls", "function_call", "refusal", "audio", "annotations")


async def chat_prompt(
    services: Services, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """The conversation in the model's own chat format, as token ids."""
    if not messages:
        raise ApiError(400, "messages is empty; send at least one", param="messages", code="invalid_value")
    for name in _RESERVED_KWARGS:
        if name in (kwargs or {}):
            message = f"chat_template_kwargs.{name} is taken by the server itself"
            raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    size = sum(len(message["content"]) for message in plain)
    return await _maybe_in_thread(size, lambda: _render(services, plain, kwargs or {}))


def split_prompts(prompt: object) -> list[str | list[int]]:
    """``/v1/completions``' prompt as a list: it is a text, a list of texts, a list of token ids or a list of such
    lists. ``ApiError`` 400 on anything else."""
    batch = isinstance(prompt, list) and (not prompt or isinstance(prompt[0], str | list))
    prompts: list[Any] = prompt if isinstance(prompt, list) and batch else [prompt]
    if not prompts:
        raise ApiError(400, "prompt is an empty list", param="prompt", code="invalid_value")
    for item in prompts:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(i) is int for i in item)):
            message = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
            raise ApiError(400, message, param="prompt", code="invalid_value")
    return prompts


async def text_prompts(services: Services, prompts: Sequence[str | list[int]]) -> list[tuple[int, ...]]:
    """Each of ``split_prompts`` as token ids."""
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await _maybe_in_thread(size, lambda: [_one_prompt(services, prompt) for prompt in prompts])


async def encode(services: Services, text: str, add_special: bool = True) -> tuple[int, ...]:
    """``text`` as token ids, long ones in a thread."""
    return await _maybe_in_thread(len(text), lambda: tuple(services.tokenizer.encode(text, add_special)))


def _render(services: Services, messages: list[dict[str, Any]], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    text = services.template.render(messages, **kwargs)
    return tuple(services.tokenizer.encode(text, add_special=False))


async def _maybe_in_thread(chars: int, work: Callable[[], T]) -> T:
    return work() if chars <= _INLINE_CHARS else await asyncio.to_thread(work)


def _one_prompt(services: Services, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(services.tokenizer.encode(prompt))
    services.tokenizer.check_ids(prompt)
    return tuple(prompt)


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    """The message as templates take it: one text, only what is given. ``developer`` is ``system`` by its newer name."""
    for name in _GAPS:
        if getattr(message, name):
            message_text = f"{where}.{name} is not implemented by this server"
            raise ApiError(400, message_text, param=f"{where}.{name}", code="not_implemented")
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"'{where}.content' is required", param=f"{where}.content", code="missing_field")
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": _text(message.content, f"{where}.content")}
    extra = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning_content}
    return plain | {key: value for key, value in extra.items() if value is not None}


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """Text parts one below the other."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Mapping[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        message = f"{where}: parts of type {str(kind)[:40]!r} are not implemented; this server takes text"
        raise ApiError(400, message, param=f"{where}.type", code="not_implemented")
    if not isinstance(text, str) or len(part) != 2:
        message = f"""{where} must be {{"type": "text", "text": "…"}} and nothing else"""
        raise ApiError(400, message, param=where, code="invalid_value")
    return text


def check_not_empty(prompts: Sequence[Sequence[int]], param: str) -> None:
    """``ApiError`` 400 for a prompt without a token: there is nothing to continue."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            where = param if len(prompts) == 1 else f"{param}[{index}]"
            raise ApiError(400, f"{where} holds no token; there is nothing to continue", param=param)
