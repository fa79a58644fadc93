"""Errors: the official client's classes, the API's shape, and messages that name field and fact."""

from __future__ import annotations

import socket
from typing import Any

import openai
import pytest
from serve_fake_worker import FakeStart

from freetoken.serve.limits import ServerLimits

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def http(served):
    with served.http() as made:
        yield made


@pytest.fixture(scope="module")
def guarded(start_server):
    with start_server(api_key="sécret", limits=ServerLimits(max_body_bytes=2000)) as running:
        yield running


def sdk(served, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.base}/v1", api_key=key, max_retries=0)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "fake/model", "messages": MESSAGES, **more})


def test_the_official_client_raises_its_class_for_400_404_and_500(served) -> None:
    """Oracle: the openai package's error classes; the 500 is a plugin's exception in the engine."""
    with sdk(served) as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            ask(client, temperature=3)
        with pytest.raises(openai.NotFoundError, match="serves 'fake/model'") as missing:
            ask(client, model="gpt-4o")
        assert missing.value.code == "model_not_found"
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="a plugin raised: boom") as broken:
                ask(client, messages=[{"role": "user", "content": "FAIL"}], stream=stream)
            assert broken.value.status_code == 500


def test_401_without_and_with_a_wrong_key_and_200_with_the_right_one(guarded) -> None:
    """Oracle: the openai package's AuthenticationError; health and readiness stay open for probes."""
    with sdk(guarded, "wrong") as client, pytest.raises(openai.AuthenticationError):
        ask(client)
    with guarded.http() as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/metrics", headers={"Authorization": "Basic abc"}).status_code == 401
        assert http.get("/nowhere").status_code == 401
        assert (http.get("/health").status_code, http.get("/ready").status_code) == (200, 200)
        right = {"Authorization": "Bearer sécret".encode()}
        assert http.get("/v1/models", headers=right).status_code == 200


def test_413_also_when_the_length_is_not_announced(guarded) -> None:
    """Oracle: the openai package's APIStatusError with 413; a chunked body cannot announce its length."""
    key = {"Authorization": "Bearer sécret".encode()}
    with guarded.http(headers=key) as http:
        big = b'{"prompt": "' + b"x" * 1_000_000 + b'"}'
        assert http.post("/v1/completions", content=big).status_code == 413
        assert http.post("/v1/completions", content=iter([big])).status_code == 413
        assert "2.0 KiB" in http.post("/v1/completions", content=big).json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "small", "max_tokens": 1}).status_code == 200


def test_413_through_the_official_client(start_server) -> None:
    """Oracle: the openai package, which has no class of its own for 413."""
    with start_server(limits=ServerLimits(max_body_bytes=2000)) as small, sdk(small) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, messages=[{"role": "user", "content": "x" * 5000}])
        assert caught.value.status_code == 413


def test_429_with_retry_after_when_the_queue_is_full_and_200_once_it_is_not(start_server) -> None:
    """Oracle: the openai package's RateLimitError; room is one running and one waiting."""
    start = FakeStart(step_s=0.01, max_running=1)
    with start_server(start, limits=ServerLimits(max_queue=1)) as narrow, sdk(narrow) as client:
        first = ask(client, stream=True, extra_body={"ignore_eos": True})
        second = ask(client, stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(openai.RateLimitError) as caught:
            ask(client)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        first.close()
        second.close()
        with narrow.http() as http:
            for _ in range(200):
                if http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200:
                    break
            else:
                pytest.fail("the queue stayed full after its clients had left")


def test_503_while_starting_with_the_phase(start_server) -> None:
    """Oracle: the openai package's InternalServerError with 503, /ready's status and /health's progress."""
    with start_server(FakeStart(start_s=3), ready=False) as slow, sdk(slow) as client, slow.http() as http:
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_starting")
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert http.get("/ready").status_code == 503
        seen = set()
        while (report := http.get("/health")).json()["status"] != "ok":
            assert report.status_code == 200
            seen.add((report.json()["phase"], report.json()["progress"]))
        assert ("weights", 0.5) in seen
        assert http.get("/ready").status_code == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/nothing"), ("POST", "/"), ("GET", "/v1/models/other")])
def test_404_in_the_apis_shape(http, method: str, path: str) -> None:
    """Oracle: the shape {"error": {"message", "type", "param", "code"}}."""
    answer = http.request(method, path)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_405_names_what_is_there(http) -> None:
    """Oracle: RFC 9110 wants an Allow header."""
    answer = http.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert "POST /v1/chat/completions" in answer.json()["error"]["message"]


def user(content: object, **more: object) -> dict[str, object]:
    return {"role": "user", "content": content, **more}


BAD_FIELDS = [
    ({"messages": []}, "messages is empty", "messages"),
    ({"messages": "hi"}, "'messages' must be a list, not the string 'hi'", "messages"),
    ({"messages": None}, "'messages' must be a list, not null", "messages"),
    ({"messages": [3]}, "'messages[0]' must be an object, not the number 3", "messages[0]"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "'messages[0].role'", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "'messages[0].content' is required", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "must be a string or a list of parts", "messages[0].content"),
    ({"messages": [user("a", mood=1)]}, "unknown field 'messages[0].mood'", "messages[0].mood"),
    ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "parts of type 'image_url' are not", None),
    ({"messages": [user([{"type": "text", "text": 3}])]}, "messages[0].content[0] must be", None),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "tool_calls is not implemented", None),
    ({"messages": [{"role": "tool", "content": "a"}]}, "the chat template refused the messages: no id", None),
    ({"temperature": "hot"}, "'temperature' must be a number, not the string 'hot'", "temperature"),
    ({"temperature": True}, "'temperature' must be a number, not the boolean True", "temperature"),
    ({"temperature": -0.1}, "temperature=-0.1: it must lie between 0 and 2", "temperature"),
    ({"top_p": 0}, "top_p=0", "top_p"),
    ({"top_p": 1.5}, "top_p=1.5", "top_p"),
    ({"top_k": -2}, "top_k=-2", "top_k"),
    ({"top_k": 1.5}, "'top_k' must be a whole number", "top_k"),
    ({"min_p": 2}, "min_p=2", "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty=0", "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty=3", "presence_penalty"),
    ({"max_tokens": 0}, "max_tokens=0: it must be at least 1", "max_tokens"),
    ({"max_tokens": -5}, "max_tokens=-5", "max_tokens"),
    ({"max_tokens": 10**30}, "ask for at most 4076", "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens=5 contradicts max_completion_tokens=6", "max_tokens"),
    ({"min_tokens": 7, "max_tokens": 6}, "min_tokens=7: max_tokens is only 6", "min_tokens"),
    ({"n": 0}, "'n'", "n"),
    ({"n": 1000}, "n=1000: at most 128", "n"),
    ({"seed": 2**64}, "it must fit in 64 bits", "seed"),
    ({"stop": ["a"] * 17}, "17 stop strings: at most 16", None),
    ({"stop": ""}, "an empty stop string", None),
    ({"stop": "x" * 5000}, "a stop string of 5000 characters", "stop"),
    ({"stop": [1]}, "'stop' must be a string or a list of strings", "stop"),
    ({"stop_token_ids": [260]}, "there is no token 260", "stop_token_ids"),
    ({"stop_token_ids": [1] * 300}, "300 stop_token_ids", "stop_token_ids"),
    ({"logit_bias": {"260": 1}}, "there is no token 260", "logit_bias"),
    ({"logit_bias": {"five": 1}}, "'five' is not a token id", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias of 101 for token 5", "logit_bias"),
    ({"logit_bias": [5]}, "'logit_bias' must be an object, not a list", "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs is for logprobs=true only", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21", "top_logprobs"),
    ({"logprobs": 1}, "'logprobs' must be true or false", "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options is for stream=true only", "stream_options"),
    ({"stream": True, "stream_options": {"often": 1}}, "unknown field 'stream_options.often'", "stream_options.often"),
    ({"stream": "yes"}, "'stream' must be true or false", "stream"),
    ({"deadline": 1.0}, "in the past", "deadline"),
    ({"timeout_s": 0}, "timeout_s=0: it must be more than 0", "timeout_s"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools is taken", "chat_template_kwargs"),
    ({"tools": [{"type": "function"}]}, "'tools' is not implemented", "tools"),
    ({"tool_choice": "required"}, "'tool_choice' is not implemented", "tool_choice"),
    ({"functions": [{}]}, "'functions' is not implemented", "functions"),
    ({"response_format": {"type": "json_object"}}, "'response_format' is not implemented", "response_format"),
    ({"audio": {}}, "'audio' is not implemented", "audio"),
    ({"temprature": 1}, "unknown field 'temprature'; this endpoint takes", "temprature"),
    ({"model": 7}, "'model' must be a string", "model"),
    ({"user": 7}, "'user' must be a string", "user"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "word", "param"), BAD_FIELDS, ids=lambda v: str(v)[:40])
def test_400_names_the_field_and_what_is_wrong(http, fields: dict[str, Any], word: str, param: str | None) -> None:
    """Oracle: field and fact in the message, the field in ``param``."""
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert word in error["message"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


def test_a_number_beyond_float_is_not_infinity(http) -> None:
    """Oracle: JSON allows 1e999, no field does."""
    answer = http.post("/v1/completions", content=b'{"prompt": "a", "timeout_s": 1e999}')
    assert answer.status_code == 400
    assert "'timeout_s': Input should be a finite number" in answer.json()["error"]["message"]


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(http) -> None:
    """Oracle: tokens are bytes, the context is 4096."""
    for text in ("x" * 4078, "x" * 100_000):  # the second is tokenized in a thread
        body = {"messages": [{"role": "user", "content": text}]}
        error = http.post("/v1/chat/completions", json=body).json()["error"]
        assert error["message"].startswith(f"the prompt has {len(text) + 18} tokens, and this model takes 4096")
        assert error["code"] == "context_length_exceeded"


RAW = [
    b"", b"{", b'{"messages": [', b"[]", b"null", b'"a"', b"\xff\xfe", b'{"messages": "\xff"}', b'{"a": NaN}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"temperature": Infinity}', b"[" * 100_000,
    b'{"seed": ' + b"9" * 10_000 + b"}", b'{"messages": []} trailing', b"\x00" * 10,
]  # fmt: skip


@pytest.mark.parametrize("raw", RAW, ids=lambda r: repr(r[:30]))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_what_is_no_json_object_is_400(http, path: str, raw: bytes) -> None:
    """Oracle: the status, and a message that says it is the JSON."""
    answer = http.post(path, content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_a_client_that_leaves_within_its_body_harms_nobody(served, http) -> None:
    """Oracle: the next request is served."""
    port = int(served.base.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_an_unforeseen_exception_is_500_without_its_text(start_server, caplog) -> None:
    """Oracle: a tokenizer that raises; the client sees neither its words nor a stack, the log has both."""
    with start_server() as running:

        def explode(*_: object) -> list[int]:
            raise ZeroDivisionError("secret words")

        running.services.tokenizer.encode = explode
        with running.http() as http:
            answer = http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert "ZeroDivisionError: secret words" in caplog.text
