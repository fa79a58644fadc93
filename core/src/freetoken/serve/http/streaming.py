"""A streamed answer: server-sent events. The status line waits for the first, so an early failure is an ordinary
error."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import Response
from starlette.types import Receive, Scope, Send

from freetoken.serve.http.errors import ClientGone, to_api_error
from freetoken.serve.http.generation import Generation
from freetoken.serve.requestlog import RequestRecord
from freetoken.serve.sse import DONE, event

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class StreamedAnswer(Response):
    """Sends ``events`` while it watches for the client hanging up, which frees the engine's pages at once."""

    def __init__(self, generation: Generation, events: AsyncIterator[bytes], record: RequestRecord) -> None:
        super().__init__()
        self._generation, self._events, self._record = generation, events, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation as generation, generation.watch(receive):
            first = await anext(self._events)
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            await self._rest(send)
        await send({"type": "http.response.body", "body": b""})

    async def _rest(self, send: Send) -> None:
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": True})
        except ClientGone:
            raise
        except Exception as error:
            # The status line is out; the stream itself has to say it.
            problem = to_api_error(error)
            self._record.finish, self._record.error = "failed", problem.message
            await send({"type": "http.response.body", "body": event(problem.body()), "more_body": True})
