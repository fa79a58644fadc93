"""The HTTP client. Oracle: the bytes that a scripted server was told to send, however they are framed and cut."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import cut, framed, scripted

from freetoken.serve.bench.http import Address, request
from freetoken.vocab.errors import EngineError, UsageError

LINES = st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")), max_size=8)


@settings(max_examples=60, deadline=None)
@given(LINES, st.lists(st.integers(0, 400), max_size=6), st.sampled_from(("chunked", "length", "end")), st.booleans())
def test_lines_survive_every_framing_and_cut(lines: list[bytes], at: list[int], framing: str, crlf: bool) -> None:
    """Property: the lines sent are the lines read."""
    end = b"\r\n" if crlf else b"\n"
    body = b"".join(line + end for line in lines)

    async def read() -> list[bytes]:
        async with (
            scripted(cut(framed(cut(body, at), framing), at)) as server,
            request(server.address, "GET", "/x") as answer,
        ):
            return [line async for line in answer.lines()]

    assert asyncio.run(read()) == lines


def test_a_request_carries_what_it_should() -> None:
    async def send() -> bytes:
        async with scripted([framed([b"{}"], "length")]) as server:
            address = Address(server.address.host, server.address.port, prefix="/base")
            async with request(address, "POST", "/x", {"a": "ä"}, {"authorization": "Bearer k"}) as answer:
                assert await answer.body() == b"{}"
            return server.requests[0]

    raw = asyncio.run(send())
    assert raw.startswith(b"POST /base/x HTTP/1.1\r\n")
    assert b"authorization: Bearer k\r\n" in raw
    assert b"content-type: application/json\r\n" in raw
    assert raw.endswith(b'\r\n\r\n{"a": "\\u00e4"}')


def test_a_broken_answer_is_an_engine_error() -> None:
    async def read() -> None:
        whole = framed([b"one\n", b"two\n"], "chunked")
        async with scripted([whole[:-9]]) as server, request(server.address, "GET", "/") as answer:
            await answer.body()

    with pytest.raises(EngineError, match="broke off"):
        asyncio.run(read())


@pytest.mark.parametrize("data", [b"", b"SSH-2.0-x\r\n"])
def test_no_http_is_an_engine_error(data: bytes) -> None:
    async def read() -> None:
        async with scripted([data]) as server, request(server.address, "GET", "/"):
            raise AssertionError("there was nothing to read")

    with pytest.raises(EngineError, match="broke off"):
        asyncio.run(read())


def test_a_silent_server_is_given_up() -> None:
    async def read() -> None:
        async with scripted([b"late"], pause_s=5) as server, request(server.address, "GET", "/", timeout_s=0.05):
            raise AssertionError("there was nothing to read")

    with pytest.raises(EngineError, match="no whole answer within"):
        asyncio.run(read())


def test_nobody_there_says_how_to_start_one() -> None:
    async def read() -> None:
        async with scripted([]) as server:
            address = server.address
        async with request(address, "GET", "/"):
            raise AssertionError("nobody listens there any more")

    with pytest.raises(UsageError, match="freetoken serve"):
        asyncio.run(read())


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:1919", Address("127.0.0.1", 1919)),
        ("http://127.0.0.1:1919/v1/", Address("127.0.0.1", 1919)),
        ("localhost:80", Address("localhost", 80)),
        ("https://api.example.org/base/v1", Address("api.example.org", 443, True, "/base")),
        ("http://[::1]:5", Address("::1", 5)),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.parse(url) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("url", ["", "http://", "ftp://host", "http://host:port", "http://host:0", "http://host:99999"])
def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        Address.parse(url)
