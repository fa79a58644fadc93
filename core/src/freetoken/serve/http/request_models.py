"""The request bodies: every field an endpoint takes, and the known ones it does not implement.

Strict: no string is read as a number and no number as a boolean. ``null`` means "not given".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from attrs import frozen
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema


@frozen
class NotImplementedField:
    """A field of the OpenAI API that this server knows and refuses, unless its value asks for nothing."""

    neutral: tuple[object, ...] = ()
    why: str = ""

    def asks_nothing(self, value: object) -> bool:
        return value is None or any(value == n and type(value) is type(n) for n in self.neutral)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class RequestBody(_Strict):
    """What every endpoint has: ``model`` must be the served one if it is given."""

    not_implemented: ClassVar[Mapping[str, NotImplementedField]] = {}
    model: str | None = None


class StreamOptions(_Strict):
    """``include_usage``: a last chunk with the token counts."""

    include_usage: bool | None = None


class GenerationBody(RequestBody):
    """What both completion endpoints take. The sampling fields mean what ``SamplingParams`` says; a field left out
    falls back to the checkpoint's ``generation_config.json``, then to the API's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, Field(description="0 and -1 are off")] = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, Field(description="token id → -100 to 100")] = None
    n: Annotated[int | None, Field(ge=1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout_s: Annotated[float | None, Field(description="finish with what there is after this many seconds")] = None
    deadline: Annotated[float | None, Field(description="the same as an instant: Unix time in seconds")] = None
    user: Annotated[str | None, Field(description="accepted and ignored")] = None
    metadata: Annotated[dict[str, Any] | None, Field(description="accepted and ignored")] = None


class ChatMessage(_Strict):
    """One message. Fields that the official client's own answers carry are known, so that they can be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    annotations: list[Any] | None = None


_NO_TOOLS = "tool calling is not there yet"

_SHARED_GAPS = {
    "service_tier": NotImplementedField(("auto", "default")),
    "store": NotImplementedField((False,)),
    "guided_json": NotImplementedField(),
    "guided_regex": NotImplementedField(),
    "guided_choice": NotImplementedField(),
    "guided_grammar": NotImplementedField(),
    "structured_outputs": NotImplementedField(),
    "priority": NotImplementedField((0,)),
    "lora_request": NotImplementedField(),
    "use_beam_search": NotImplementedField((False,)),
    "length_penalty": NotImplementedField((1.0, 1)),
    "prompt_logprobs": NotImplementedField(),
}


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    not_implemented: ClassVar[Mapping[str, NotImplementedField]] = {
        **_SHARED_GAPS,
        "tools": NotImplementedField(([],), _NO_TOOLS),
        "tool_choice": NotImplementedField(("none", "auto"), _NO_TOOLS),
        "parallel_tool_calls": NotImplementedField((True, False)),
        "functions": NotImplementedField(([],), _NO_TOOLS),
        "function_call": NotImplementedField(("none", "auto"), _NO_TOOLS),
        "response_format": NotImplementedField(({"type": "text"},), "answers are free text"),
        "modalities": NotImplementedField((["text"],), "this server writes text"),
        "audio": NotImplementedField((), "this server writes text"),
        "prediction": NotImplementedField(),
        "reasoning_effort": NotImplementedField((), "use chat_template_kwargs, if the model's template knows a switch"),
        "verbosity": NotImplementedField(("medium",)),
        "web_search_options": NotImplementedField(),
        "prompt_cache_key": NotImplementedField((), "equal prefixes are found without a key"),
        "safety_identifier": NotImplementedField((), "use user"),
        "documents": NotImplementedField(),
        "chat_template": NotImplementedField((), "the template is the checkpoint's"),
        "add_generation_prompt": NotImplementedField((True,)),
        "continue_final_message": NotImplementedField((False,)),
    }
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    not_implemented: ClassVar[Mapping[str, NotImplementedField]] = {
        **_SHARED_GAPS,
        "suffix": NotImplementedField(("",), "text is only continued, not filled in"),
        "best_of": NotImplementedField((1,), "ask for n"),
    }
    prompt: _Prompt
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeBody(RequestBody):
    """``POST /tokenize``: a text, or messages as the chat endpoint would send them to the model."""

    text: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    """``POST /detokenize``."""

    tokens: list[int]
    skip_special_tokens: bool | None = None


class ProfileBody(RequestBody):
    """``POST /warmup/profile``."""

    on: bool
