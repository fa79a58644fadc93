"""A request's sampling fields as ``SamplingParams``: the request first, then the checkpoint's wishes, then the API."""

from __future__ import annotations

import time

from freetoken.serve.http.errors import ApiError
from freetoken.serve.http.request_models import GenerationBody
from freetoken.serve.messages import Ready
from freetoken.serve.text import GenerationDefaults
from freetoken.vocab.sampling import SamplingParams

MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
_GIVEN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def sampling_params(
    body: GenerationBody, defaults: GenerationDefaults, limits: Ready, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Raises ``ApiError`` 400 or ``UsageError``, both naming the field."""
    values: dict[str, object] = dict(defaults.sampling())
    values |= {name: value for name in _GIVEN if (value := getattr(body, name)) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    values["max_tokens"] = max_tokens
    values["logprobs"] = logprobs
    values["stop"] = _stop_strings(body.stop)
    values["stop_token_ids"] = _stop_token_ids(body.stop_token_ids, limits.vocab_size)
    values["logit_bias"] = _logit_bias(body.logit_bias, limits.vocab_size)
    return SamplingParams(**values)  # type: ignore[arg-type]


def max_new_tokens(asked: int | None, prompt_tokens: int, limits: Ready, fallback: int | None = None) -> int:
    """How many tokens may be generated: as asked, else ``fallback``, at most the rest of the context. ``ApiError`` 400
    with the numbers when prompt or request do not fit."""
    context = min(limits.max_seq_tokens, limits.kv_tokens)
    room = context - prompt_tokens
    if room < 1:
        message = f"the prompt has {prompt_tokens} tokens, and this model takes {context} with the answer"
        raise ApiError(400, message, code="context_length_exceeded")
    if asked is None:
        return room if fallback is None else min(room, fallback)
    if asked < 1:
        raise ApiError(400, f"max_tokens={asked}: it must be at least 1", param="max_tokens", code="invalid_value")
    if asked > room:
        message = (
            f"max_tokens={asked} with a prompt of {prompt_tokens} tokens is {asked + prompt_tokens} tokens, "
            f"and this model takes {context}; ask for at most {room}"
        )
        raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
    return asked


def deadline_of(body: GenerationBody, server_timeout_s: float | None = None) -> float | None:
    """The earliest of the server's own limit, ``deadline`` and ``timeout_s`` as a ``time.monotonic`` instant.

    ``ApiError`` 400 when it has passed.
    """
    left = [] if server_timeout_s is None else [server_timeout_s]
    if body.timeout_s is not None:
        if body.timeout_s <= 0:
            raise ApiError(400, f"timeout_s={body.timeout_s:g}: it must be more than 0", param="timeout_s")
        left.append(body.timeout_s)
    if body.deadline is not None:
        ahead = body.deadline - time.time()
        if ahead <= 0:
            message = f"deadline={body.deadline:f} is {-ahead:.3f} s in the past; it is Unix time in seconds"
            raise ApiError(400, message, param="deadline", code="deadline_past")
        left.append(ahead)
    return time.monotonic() + min(left) if left else None


def choices_of(body: GenerationBody, prompts: int, max_choices: int) -> int:
    """``n``; ``ApiError`` 400 when all prompts together ask for more than the server takes in one request."""
    n = body.n if body.n is not None else 1
    if n * prompts > max_choices:
        asked = f"n={n}" + (f" for {prompts} prompts" if prompts > 1 else "")
        raise ApiError(400, f"{asked}: at most {max_choices} answers in one request", param="n", code="invalid_value")
    return n


def check_stream_options(body: GenerationBody) -> bool:
    """Whether the usage chunk is wanted."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ApiError(400, "stream_options is for stream=true only", param="stream_options", code="invalid_value")
    return bool(body.stream_options.include_usage)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        message = f"a stop string of {longest} characters; at most {MAX_STOP_CHARS} are taken"
        raise ApiError(400, message, param="stop", code="invalid_value")
    return stops


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    stops = tuple(ids or ())
    if len(stops) > MAX_STOP_TOKEN_IDS:
        message = f"{len(stops)} stop_token_ids; at most {MAX_STOP_TOKEN_IDS} are taken"
        raise ApiError(400, message, param="stop_token_ids", code="invalid_value")
    for token_id in stops:
        _check_id(token_id, vocab_size, "stop_token_ids")
    return stops


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > MAX_LOGIT_BIAS:
        message = f"logit_bias for {len(bias)} tokens; at most {MAX_LOGIT_BIAS} are taken"
        raise ApiError(400, message, param="logit_bias", code="invalid_value")
    return tuple(_one_bias(key, value, vocab_size) for key, value in bias.items())


def _one_bias(key: str, value: float, vocab_size: int) -> tuple[int, float]:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ApiError(400, f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias", code="invalid_value")
    token_id = int(key)
    _check_id(token_id, vocab_size, "logit_bias")
    if not -100 <= value <= 100:
        message = f"logit_bias of {value:g} for token {token_id}; it must lie between -100 and 100"
        raise ApiError(400, message, param="logit_bias", code="invalid_value")
    return token_id, value


def _check_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        message = f"{param}: there is no token {token_id}; this model's ids run from 0 to {vocab_size - 1}"
        raise ApiError(400, message, param=param, code="invalid_value")
