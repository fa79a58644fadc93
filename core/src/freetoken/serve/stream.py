"""The token stream of one HTTP request: what the engine says about its choices, in order, as an async iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

from freetoken.serve.messages import Delta


class TokenStream:
    """Deltas of one or several request ids (``n`` choices, a list of prompts), until each has finished.

    Iterate it inside ``with``: leaving the block aborts at the engine whatever is still running. Lives on one event
    loop; only ``push`` and ``fail`` are called by the client, everything else by the consumer.
    """

    __slots__ = ("_abort", "_error", "_forget", "_items", "_loop", "_open", "_waiter", "ids")

    def __init__(
        self, ids: Iterable[str], abort: Callable[[str], None], forget: Callable[[Iterable[str]], None]
    ) -> None:
        self.ids = tuple(ids)
        self._open = set(self.ids)
        self._items: deque[Delta] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._abort = abort
        self._forget = forget

    @property
    def open_ids(self) -> frozenset[str]:
        """The ids whose last delta has not come yet."""
        return frozenset(self._open)

    def push(self, delta: Delta) -> None:
        """News from the engine; dropped for an id the consumer has finished with."""
        if delta.request_id not in self._open:
            return
        if delta.finish:
            self._open.discard(delta.request_id)
        self._items.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream: after the deltas already here, iteration raises ``error``. The first error stays."""
        if self._error is None:
            self._error = error
            self._wake()

    def finish(self, request_id: str) -> None:
        """The consumer has enough of one id (a stop string matched): drop what has come, free its pages at once."""
        self._items = deque(item for item in self._items if item.request_id != request_id)
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort(request_id)

    def close(self) -> None:
        """Abort what is still running and forget the stream."""
        for request_id in tuple(self._open):
            self.finish(request_id)
        self._forget(self.ids)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._items:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._items.popleft()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
