"""``/v1/completions``, ``/tokenize`` and ``/detokenize`` against the fake engine's script and the byte tokenizer."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_fake_worker import FakeStart

ANSWER = FakeStart().answer


@pytest.fixture(scope="module")
def http(served):
    with served.http() as made:
        yield made


def complete(http, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"], [[97, 98]]])
def test_the_four_shapes_of_one_prompt_give_one_answer(http, prompt: object) -> None:
    """Oracle: the script cut at the API's default of 16 tokens (16 bytes, of which ö takes two)."""
    answer = complete(http, prompt=prompt)
    assert answer["object"] == "text_completion"
    assert [choice["text"] for choice in answer["choices"]] == [ANSWER.encode()[:16].decode()]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 2


def test_lists_and_n_number_their_choices_prompt_by_prompt(http) -> None:
    """Oracle: the API's order, seen through echo."""
    answer = complete(http, prompt=["one ", "two "], n=2, echo=True, max_tokens=5)
    assert [choice["text"] for choice in answer["choices"]] == ["one Hello"] * 2 + ["two Hello"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 20


def test_echo_of_token_ids_is_their_text(http) -> None:
    """Oracle: the tokenizer's decode, by hand."""
    assert complete(http, prompt=[104, 105], echo=True, max_tokens=1)["choices"][0]["text"] == "hiH"


def test_streamed_is_the_same_text(served) -> None:
    """Oracle: the official client, and the script."""
    with openai.OpenAI(base_url=f"{served.base}/v1", api_key="any", max_retries=0) as client:
        stream = client.completions.create(model="fake/model", prompt="x", stream=True, max_tokens=100, echo=True)
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "x" + ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_in_this_endpoints_own_shape(http) -> None:
    """Oracle: the tokens spell the text, offsets are sums of lengths, alternatives are the fake's."""
    logprobs = complete(http, prompt="x", max_tokens=5, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("Hello")
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"][0] == {"H": -0.5, "I": -1.5}


def test_streamed_logprobs_keep_counting_offsets(http) -> None:
    """Oracle: the unstreamed answer."""
    body = {"prompt": "x", "max_tokens": 5, "logprobs": 0, "stream": True}
    lines = http.post("/v1/completions", json=body).text.split("\n\n")
    parts = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines if line.startswith("data: {")]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 2, 3, 4]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_tokenize_and_detokenize_are_a_round_trip(http, text: str) -> None:
    """Round trip, and the byte tokenizer's definition."""
    answer = http.post("/tokenize", json={"text": text, "return_token_strs": True}).json()
    assert answer["tokens"] == list(text.encode())
    assert answer["count"] == len(answer["token_strs"]) == len(answer["tokens"])
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"text": text}


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "'suffix' is not implemented"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "'best_of' is not implemented"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, "echo with logprobs is not implemented"),
        ("/v1/completions", {"prompt": ""}, "prompt holds no token"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt[1] holds no token"),
        ("/v1/completions", {"prompt": []}, "prompt is an empty list"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt must be a string"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt must be a string"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt must be a string"),
        ("/v1/completions", {"prompt": [True]}, "prompt must be a string"),
        ("/v1/completions", {"prompt": [99999]}, "token id 99999 at position 0"),
        ("/v1/completions", {"prompt": [-1]}, "token id -1"),
        ("/v1/completions", {"prompt": ["a"] * 70, "n": 2}, "n=2 for 70 prompts: at most 128"),
        ("/v1/completions", {}, "'prompt' is required"),
        ("/v1/completions", {"prompt": "a", "messages": []}, "unknown field 'messages'"),
        ("/tokenize", {}, "either text or messages"),
        ("/tokenize", {"text": "a", "messages": []}, "either text or messages"),
        ("/detokenize", {"tokens": [260]}, "token id 260"),
        ("/detokenize", {"tokens": "abc"}, "'tokens' must be a list"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, path: str, body: object, word: str) -> None:
    """Oracle: the message names field and fact."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]
