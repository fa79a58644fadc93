"""Chat templates rendered against transformers' ``apply_chat_template``, and kept within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from freetoken.serve.text import ChatTemplate
from freetoken.serve.text import chat_template as module
from freetoken.vocab.errors import CheckpointError, UsageError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if tools is not none %}{{ "Environment: tools\\n" }}{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unexpected role ' ~ message.role ~ '!') }}
    {%- endif %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools %}
        {%- for tool in tools %}{{ tool | tojson(indent=4) ~ "\\n\\n" }}{% endfor %}
    {%- endif %}
    {%- for call in message.tool_calls | default([]) %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' }}{{ call.function.arguments | tojson }}{{ "}" }}
    {%- endfor %}
    {{- message.content | default('') | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

THINKING = """\
{%- macro block(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- set ns = namespace(last_user=-1, thoughts=0) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == "user" and ns.last_user < 0 %}{% set ns.last_user = index %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<tools>' }}{% for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}{{ '\\n</tools>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- set text = message.content %}
        {%- if '</think>' in text and loop.index0 < ns.last_user %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- block('assistant', text) }}
        {%- endgeneration %}
    {%- elif message.role == 'system' %}{% continue %}
    {%- else %}{{ block(message.role, message.content) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

TALK = [
    {"role": "system", "content": "  You <b>&amp;</b> 'I' \u00e9\u4f60 "},
    {"role": "user", "content": "Hi {{ not jinja }} {% if %}\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
    {"role": "user", "content": ""},
]
TOOLS = [
    {"type": "function", "function": {"name": "f<>", "description": "l'\u00e9t\u00e9", "parameters": {"a": [1, None]}}}
]


@pytest.fixture(scope="module")
def apply() -> Any:
    """transformers' rendering of a template with given special tokens."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    def rendered(source: str, messages: list[Any], **kwargs: Any) -> str:
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
        kwargs = {"add_generation_prompt": True, **kwargs}
        text: str = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **kwargs)
        return text

    return rendered


@pytest.mark.parametrize("source", [CHATML, HEADERS, THINKING], ids=["chatml", "headers", "thinking"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": TOOLS},
        {"enable_thinking": False},
        {"date_string": "today"},
    ],
    ids=lambda kwargs: ",".join(kwargs) or "plain",
)
@pytest.mark.parametrize("messages", [TALK, TALK[1:], TALK[1:2]], ids=["all", "no system", "one"])
def test_renders_as_transformers(apply: Any, source: str, kwargs: dict[str, Any], messages: list[Any]) -> None:
    ours = ChatTemplate({"default": source}, SPECIAL).render(messages, **kwargs)
    assert ours == apply(source, messages, **kwargs)
    assert ours


def test_empty_values_are_left_out_as_in_transformers(apply: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": None}]
    assert ChatTemplate({"default": HEADERS}, SPECIAL).render(messages) == apply(HEADERS, messages)


def test_tool_arguments_are_parsed(apply: Any) -> None:
    """Oracle: transformers given the arguments as an object; the API's JSON text renders the same."""

    def talk(arguments: object) -> list[Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]

    ours = ChatTemplate({"default": HEADERS}, SPECIAL)
    assert ours.render(talk('{"a": "<é>", "b": [1]}')) == apply(HEADERS, talk({"a": "<é>", "b": [1]}))
    assert '"parameters": "not json"' in ours.render(talk("not json"))


def test_tools_may_have_a_template_of_their_own() -> None:
    """Second look at the contract: "tool_use" is taken when tools are given, and only then."""
    ours = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert (ours.render([]), ours.render([], tools=[]), ours.render([], tools=TOOLS)) == ("plain", "plain", "tools")


def test_the_date_is_todays() -> None:
    """Oracle: the clock."""
    from datetime import datetime

    before = datetime.now().strftime("%Y")
    year = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {}).render([])
    assert year in (before, datetime.now().strftime("%Y"))


def test_a_template_that_refuses_says_so_in_its_own_words() -> None:
    with pytest.raises(UsageError, match="Unexpected role wizard!"):
        ChatTemplate({"default": HEADERS}, SPECIAL).render([{"role": "wizard", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.strip() }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ tools | length }}",
        "{{ messages | tojson(nonsense=1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'elsewhere' %}",
    ],
)
def test_a_template_that_fails_is_a_usage_error(source: str) -> None:
    with pytest.raises(UsageError, match="chat template"):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ cycler.__init__.__globals__ }}{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}{{ raise_exception.__globals__['json'].dumps(1) }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(UsageError):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * ['x'] }}",
        "{{ 9 ** 999999999 }}",
    ],
)
def test_a_runaway_template_ends(source: str) -> None:
    with pytest.raises(UsageError, match="chat template"):
        ChatTemplate({"default": source}, {}).render([])


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RENDERED_CHARS", 1000)
    ours = ChatTemplate({"default": "{% for i in range(n) %}0123456789{% endfor %}"}, {})
    assert len(ours.render([], n=100)) == 1000
    with pytest.raises(UsageError, match="longer than 1,000"):
        ours.render([], n=101)


@pytest.mark.parametrize("source", ["{% for x in %}", "{{ 'unterminated }}", "{% endif %}", "{{ x | nosuchfilter }}"])
def test_a_template_that_cannot_be_compiled_fails_the_start(source: str) -> None:
    with pytest.raises(CheckpointError, match="default"):
        ChatTemplate({"default": "ok\n" + source}, {})


def test_without_a_template_the_way_out_is_named() -> None:
    ours = ChatTemplate({}, {})
    assert not ours.available
    with pytest.raises(UsageError, match="/v1/completions"):
        ours.render([{"role": "user", "content": "x"}])


def test_clients_variables_cannot_replace_the_messages() -> None:
    ours = ChatTemplate({"default": "{{ messages[0].content }}{{ range(2) | list }}{{ extra }}"}, {})
    assert ours.render([{"content": "a"}], messages=[], range=1, extra="!") == "a[0, 1]!"


@pytest.mark.model
def test_smollm2s_own_template_renders_as_transformers(smollm2: Any, apply: Any) -> None:
    source = smollm2.chat_templates["default"]
    ours = ChatTemplate(smollm2.chat_templates, smollm2.special_tokens)
    for messages in (TALK, TALK[1:], TALK[1:2]):
        assert ours.render(messages) == apply(source, messages)
