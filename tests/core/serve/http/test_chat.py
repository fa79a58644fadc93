"""``/v1/chat/completions`` through the official client and raw HTTP, against the fake engine's script."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from serve_fake_worker import FakeStart

ANSWER = FakeStart().answer
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT = "[user]hi\n[assistant]"


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.base}/v1", api_key="any", max_retries=0) as made:
        yield made


def events(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks[:-1]]


def test_the_official_client_gets_the_answer_whole(client) -> None:
    """Oracle: the script; token counts by hand (tokens are bytes, one more for the end token)."""
    answer = client.chat.completions.create(model="fake/model", messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(ANSWER.encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_the_official_client_streams_it(client) -> None:
    """Oracle: the script; no chunk splits the two bytes of ö."""
    stream = client.chat.completions.create(model="fake/model", messages=MESSAGES, stream=True)
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(texts) == ANSWER
    assert "ö" in texts
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_with_no_choices(served) -> None:
    """Oracle: the API's rule for include_usage, and the counts of the unstreamed answer."""
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    with served.http() as http:
        *rest, last = events(http.post("/v1/chat/completions", json=body).text)
        whole = http.post("/v1/chat/completions", json={"messages": MESSAGES}).json()
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in rest)
    assert {chunk["id"] for chunk in rest} == {last["id"]}


def test_n_choices_are_each_whole_streamed_or_not(client) -> None:
    """Oracle: the script, once for every choice; the prompt is billed once."""
    whole = client.chat.completions.create(model="fake/model", messages=MESSAGES, n=3, temperature=0)
    assert [choice.message.content for choice in whole.choices] == [ANSWER] * 3
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.prompt_tokens == len(PROMPT)
    assert whole.usage.prompt_tokens_details.cached_tokens == 2
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model="fake/model", messages=MESSAGES, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [ANSWER] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "found"), [("wör", "wör"), (["zzz", "ld"], "ld"), ("H", "H"), ("d!\n", None)])
def test_a_stop_string_ends_the_answer_before_itself(served, stop: object, found: str | None, stream: bool) -> None:
    """Oracle: str.partition on the script; the engine is told to abort."""
    aborts = served.counter("aborts")
    body = {"messages": MESSAGES, "stop": stop, "stream": stream}
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(answer.text)]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        ends = [(c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]]
    else:
        choice = answer.json()["choices"][0]
        text, ends = choice["message"]["content"], [(choice["finish_reason"], choice["stop_reason"])]
    assert text == (ANSWER if found is None else ANSWER.partition(found)[0])
    assert ends == [("stop", found if found is not None else 256)]
    assert served.counter("aborts") >= aborts


def test_min_tokens_keeps_a_stop_string_from_ending_it_early(served) -> None:
    """Oracle: the second "l…s" of the script ends it, since the first lies within min_tokens."""
    body = {"messages": MESSAGES, "stop": "l", "min_tokens": 14}
    with served.http() as http:
        text = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert text == "Hello, wörld! This is a scripted answer."[: len(text)]
    assert len(text) > ANSWER.index("!")


def test_length_stop_ids_and_ignore_eos(served) -> None:
    """Oracle: the script cut by hand; with ignore_eos it starts over after the end token."""
    with served.http() as http:

        def choice(**more: Any) -> dict[str, Any]:
            return http.post("/v1/chat/completions", json={"messages": MESSAGES, **more}).json()["choices"][0]

        cut = choice(max_completion_tokens=5)
        assert (cut["message"]["content"], cut["finish_reason"]) == ("Hello", "length")
        stopped = choice(stop_token_ids=[ord("o")])
        assert (stopped["message"]["content"], stopped["finish_reason"]) == ("Hell", "stop")
        assert stopped["stop_reason"] == ord("o")
        long = choice(ignore_eos=True, max_tokens=len(ANSWER.encode()) + 1 + 5)
        assert (long["message"]["content"], long["finish_reason"]) == (ANSWER + "Hello", "length")


def test_logprobs_name_every_token_of_the_text(client) -> None:
    """Oracle: the bytes of all entries together are the text; the fake's alternatives are the next ids."""
    options: dict[str, Any] = {"model": "fake/model", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    entries = client.chat.completions.create(**options).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == ANSWER
    assert [top.token for top in entries[0].top_logprobs] == ["H", "I"]
    assert entries[0].logprob == -0.5
    streamed = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]


def test_every_role_and_text_parts_reach_the_template(served) -> None:
    """Oracle: the template's text, through /tokenize's token ids; developer is system, parts stand on lines."""
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "42", "tool_call_id": "t1"},
    ]
    with served.http() as http:
        tokens = http.post("/tokenize", json={"messages": messages, "chat_template_kwargs": {"shout": True}}).json()
    text = bytes(tokens["tokens"]).decode()
    assert text == "[system]be kind\n[user]a\nb\n[assistant]\n[tool]42\n[assistant]!"


def test_the_clients_own_answer_can_be_sent_back(client) -> None:
    """Oracle: the official client's message dump is a message the server takes."""
    first = client.chat.completions.create(model="fake/model", messages=MESSAGES).choices[0].message
    again = client.chat.completions.create(model="fake/model", messages=[*MESSAGES, first.model_dump(), *MESSAGES])
    assert again.choices[0].message.content == ANSWER


def test_what_asks_for_nothing_is_accepted(served) -> None:
    """Oracle: the API's documented defaults, sent explicitly, are what is served anyway."""
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "modalities": ["text"],
        "top_k": -1, "logit_bias": {}, "stop": None, "user": "u", "metadata": {"a": [1]}, "audio": None, "n": 1,
    }  # fmt: skip
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **neutral})
    assert answer.status_code == 200, answer.text


def test_a_deadline_finishes_with_what_there_is(start_server) -> None:
    """Oracle: an endless answer at 10 ms a token, asked to end after 0.3 s, is neither empty nor an error."""
    with start_server(FakeStart(step_s=0.01)) as slow, slow.http() as http:
        body = {"messages": MESSAGES, "ignore_eos": True, "timeout_s": 0.3}
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert choice["message"]["content"].startswith("Hello")


def test_request_ids_are_kept_or_made(served) -> None:
    """Oracle: the header sent; an insane one is replaced."""
    with served.http() as http:
        kept = http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"]
        made = http.get("/health", headers={"X-Request-Id": "no spaces please"}).headers["x-request-id"]
        body = {"messages": MESSAGES, "max_tokens": 1}
        answer = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-2"})
    assert (kept, answer.headers["x-request-id"]) == ("mine-1", "mine-2")
    assert answer.json()["id"] == "chatcmpl-mine-2"
    assert made != "no spaces please"
    assert made.isalnum()
