"""One HTTP request over asyncio streams, its body line by line as it arrives. Standard library alone."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from attrs import frozen

from freetoken.vocab.errors import EngineError, UsageError

_LINE_BYTES = 16 * 1024 * 1024  # the longest line that a body may have


@frozen
class Address:
    """Where a server listens; ``prefix`` stands before every path."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """``http://host:port``, with or without ``/v1``. Raises ``UsageError`` for anything else."""
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise UsageError(f"the URL {url!r}", "it is no address of an HTTP server", "write http://127.0.0.1:1919")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


class Answer:
    """A response whose head has been read."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def lines(self) -> AsyncIterator[bytes]:
        """The body's lines, each as soon as it is whole, without its end."""
        rest = b""
        async for data in self._pieces():
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line.removesuffix(b"\r")
        if rest:
            yield rest

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([piece async for piece in self._pieces()])

    async def _pieces(self) -> AsyncIterator[bytes]:
        reader = self._reader
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
                yield (await reader.readexactly(size + 2))[:-2]
        elif "content-length" in self.headers:
            left = int(self.headers["content-length"])
            while left and (data := await reader.read(min(left, 65536))):
                left -= len(data)
                yield data
        else:
            while data := await reader.read(65536):
                yield data


@asynccontextmanager
async def request(
    address: Address,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> AsyncIterator[Answer]:
    """Send one request on a connection of its own. ``timeout_s`` bounds the whole exchange.

    Raises ``UsageError`` when nobody answers there, ``EngineError`` when the answer stops half-way or takes too long.
    """
    asked = f"{method} {address}{path}"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(address)
            try:
                writer.write(_head(address, method, path, body, headers or {}))
                await writer.drain()
                yield await _answer(reader)
            finally:
                writer.close()
    except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
        raise EngineError(asked, f"the answer broke off: {type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise EngineError(asked, f"no whole answer within {timeout_s:g} s", "give it more with --timeout") from error


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context() if address.tls else None
    try:
        return await asyncio.open_connection(address.host, address.port, ssl=context, limit=_LINE_BYTES)
    except OSError as error:
        raise UsageError(
            f"a server at {address}", f"nothing answers there: {error}", "start one, for example: freetoken serve"
        ) from error


def _head(address: Address, method: str, path: str, body: object, headers: Mapping[str, str]) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    lines = {
        "host": f"{address.host}:{address.port}",
        "connection": "close",
        "accept": "*/*",
        "content-length": str(len(data)),
        **({} if body is None else {"content-type": "application/json"}),
        **headers,
    }
    head = f"{method} {address.prefix}{path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return head.encode() + b"\r\n" + data


async def _answer(reader: asyncio.StreamReader) -> Answer:
    words = (await reader.readline()).split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ConnectionError("it is no HTTP answer" if words else "the connection was closed without an answer")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return Answer(int(words[1]), headers, reader)
