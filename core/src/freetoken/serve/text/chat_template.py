"""A conversation written out as the text a model was trained on, by the checkpoint's Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from freetoken.vocab.errors import CheckpointError, UsageError

MAX_RENDERED_CHARS = 32 * 1024 * 1024
MAX_RANGE_ITEMS = 1_000_000  # over one rendering


class ChatTemplate:
    """``templates`` maps names to sources: ``"default"``, and ``"tool_use"`` where tools have a template of their own.

    ``special_tokens`` (``{"bos_token": "<s>"}``) are variables of the template. All templates are compiled here:
    ``CheckpointError`` with name and line when one cannot be. Rendering is thread-safe.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._environment = _Environment()
        self._templates = {name: self._compile(name, source) for name, source in templates.items()}

    @property
    def available(self) -> bool:
        """Whether there is anything to render with."""
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt, special tokens included (so it is encoded with ``add_special=False``).

        ``kwargs`` are further variables (``enable_thinking``). ``UsageError`` when there is no template, when the
        template refuses the messages (with its own words) or when it cannot cope with them.
        """
        template = self._chosen(tools)
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": [_prepared(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "range": _BoundedRange(),
        }
        try:
            return _joined(template.generate(variables))
        except UsageError:
            raise
        except _Refused as error:
            raise UsageError("the chat template refused the messages", str(error)) from error
        except Exception as error:  # whatever an expression of the template raises on values it was not written for
            raise UsageError(
                "the chat template failed on the messages", f"{type(error).__name__}: {error}", _FIX_MESSAGES
            ) from error

    def _chosen(self, tools: object) -> jinja2.Template:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise UsageError(
                "a chat completion",
                "this checkpoint has no chat template: it is a base model, which continues text",
                "use /v1/completions, or serve an instruct model",
            )
        return self._templates[name]

    def _compile(self, name: str, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"chat template {name!r}, line {error.lineno}", error.message or "it cannot be compiled", _FIX_TEMPLATE
            ) from error
        except RecursionError as error:
            raise CheckpointError(
                f"chat template {name!r}", "it is nested too deeply to be compiled", _FIX_TEMPLATE
            ) from error


_FIX_TEMPLATE = "correct the checkpoint's chat template, or take it from where the model was published"
_FIX_MESSAGES = "check roles, order and content of the messages against what the model's template takes"


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: keys without a value left out, tool arguments parsed.

    The API carries a tool call's arguments as JSON text, templates write them out with ``tojson``. Text that is not a
    JSON object is handed on as it is.
    """
    present = {key: value for key, value in message.items() if value is not None}
    calls = present.get("tool_calls")
    if isinstance(calls, list):
        present["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return present


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text)
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _joined(pieces: Any) -> str:
    length, kept = 0, []
    for piece in pieces:
        length += len(piece)
        if length > MAX_RENDERED_CHARS:
            raise UsageError(
                "the chat template's output", f"it is longer than {MAX_RENDERED_CHARS:,} characters", "send less text"
            )
        kept.append(piece)
    return "".join(kept)


# ------------------------------------------------------------------------------------------- the template's world


class _Environment(ImmutableSandboxedEnvironment):
    """What Hugging Face templates are written against: trimmed blocks, loop controls, JSON without HTML escapes."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Products that would eat the memory or the hour: repeated texts and lists, and powers."""
        if operator == "*":
            repeated = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
            counts = [side for side in (left, right) if isinstance(side, int)]
            if repeated and counts and repeated[0] * counts[0] > MAX_RENDERED_CHARS:
                raise jinja2.TemplateRuntimeError("the template repeats a text too often")
        elif isinstance(right, int) and abs(right) > 64:
            raise jinja2.TemplateRuntimeError("the template raises a number to too high a power")
        return super().call_binop(context, operator, left, right)


class _BoundedRange:
    """``range`` whose items are counted over one rendering, so that nested loops end too."""

    def __init__(self) -> None:
        self._left = MAX_RANGE_ITEMS

    def __call__(self, *bounds: int) -> range:
        items = range(*bounds)
        self._left -= len(items)
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(f"the template loops over more than {MAX_RANGE_ITEMS:,} numbers")
        return items


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's part for training; here it is just output."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Refused(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
