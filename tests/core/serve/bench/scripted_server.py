"""A server that answers every connection with given bytes, in given pieces, and keeps what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

from freetoken.serve.bench.http import Address


class Scripted:
    """``requests`` are the raw heads and bodies that came."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.requests: list[bytes] = []


@asynccontextmanager
async def scripted(pieces: Sequence[bytes], pause_s: float = 0.0) -> AsyncIterator[Scripted]:
    """Serve ``pieces`` one write each, ``pause_s`` before every one of them."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.startswith(b"content-length:")), 0)
        server.requests.append(head + await reader.readexactly(length))
        for piece in pieces:
            await asyncio.sleep(pause_s)
            writer.write(piece)
            await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()[:2]
    server = Scripted(Address(host, port))
    async with listener:
        yield server


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    """``data`` in pieces, cut at these offsets."""
    marks = sorted({0, len(data), *(offset % (len(data) + 1) for offset in at)})
    return [data[a:b] for a, b in pairwise(marks)]


def framed(body: Sequence[bytes], framing: str) -> bytes:
    """A whole answer with ``body`` as chunks, by its length, or until the end of the connection."""
    whole = b"".join(body)
    if framing == "chunked":
        chunks = b"".join(b"%x;note=1\r\n%s\r\n" % (len(part), part) for part in body if part)
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    if framing == "length":
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(whole), whole)
    return b"HTTP/1.1 200 OK\r\n\r\n" + whole
