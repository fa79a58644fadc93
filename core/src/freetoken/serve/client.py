"""The engine client: the HTTP process's end of the connection to one engine process.

A reader thread blocks on the connection and hands each message to the event loop with one call; a writer thread sends,
so that an engine busy with a long step cannot stall the loop; a watcher thread waits for the process to end.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection

from attrs import frozen

from freetoken.serve.child import WorkerTarget, run_worker
from freetoken.serve.messages import (
    Abort,
    Deltas,
    EngineStats,
    FromEngine,
    Profile,
    ProfileAnswer,
    Progress,
    Ready,
    RequestFailed,
    Shutdown,
    StartFailed,
    Submit,
    ToEngine,
)
from freetoken.serve.stream import TokenStream
from freetoken.vocab.errors import EngineError, FreeTokenError, Refusal

_EOF_GRACE_S = 0.5
_LEAVE_GRACE_S = 3.0

StatusMessage = Progress | Ready | StartFailed | EngineStats | ProfileAnswer


class EngineDied(EngineError):
    """The engine process ended while the request waited for it."""


class RequestRefused(FreeTokenError):
    """The engine refused one request; ``status`` is the HTTP status that fits."""

    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(refusal.asked, refusal.found, refusal.fix)
        self.status = status


@frozen(eq=False)
class EngineProcess:
    """A spawned engine process and our end of its pipe."""

    process: multiprocessing.process.BaseProcess
    conn: Connection

    def kill(self) -> None:
        self.process.kill()


def spawn_engine(target: WorkerTarget, start: object) -> EngineProcess:
    """Start the process. Call from a thread that lives as long as the program: on Linux the death signal of the child
    follows the thread that started it. What it says before a client takes it over waits in the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=True)
    process = context.Process(target=run_worker, args=(target, theirs, start, os.getpid()), name="freetoken-engine")
    try:
        process.start()
    finally:
        theirs.close()  # so that the child's death is the end of file here
    launched = EngineProcess(process, ours)
    atexit.register(process.kill)  # multiprocessing's own exit handler would wait for the child for ever
    return launched


class EngineClient:
    """One life of the engine process, and the streams that wait for it.

    ``target(conn, start)`` runs in a spawned process; ``target`` may be ``"module:function"``, which spares this
    process the import. ``on_message`` gets what concerns no single request; ``on_exit`` gets the reason, once, after
    every waiting stream has been failed with ``EngineDied``. Both are called on the event loop. All methods belong to
    the loop's thread.
    """

    def __init__(
        self,
        target: WorkerTarget,
        start: object,
        on_message: Callable[[StatusMessage], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self._target = target
        self._start = start
        self._on_message = on_message
        self._on_exit = on_exit
        self._streams: dict[str, TokenStream] = {}
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._exit_code: int | None = None
        self._over = False
        self._closed = asyncio.Event()

    # ------------------------------------------------------------------------------------------- life

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._over

    def launch(self, spawned: EngineProcess | None = None) -> None:
        """Start the three threads around ``spawned``, or around a process of its own (see ``spawn_engine``)."""
        self._loop = asyncio.get_running_loop()
        engine = spawned if spawned is not None else spawn_engine(self._target, self._start)
        self._process, self._conn = engine.process, engine.conn
        for name, run in (("reader", self._read), ("writer", self._write), ("watcher", self._watch)):
            threading.Thread(target=run, name=f"engine-{name}", daemon=True).start()

    def shutdown(self, drain: bool) -> None:
        """Ask the engine to stop."""
        self._send(Shutdown(drain=drain))

    def kill(self) -> None:
        """End the process at once (SIGKILL); ``on_exit`` follows."""
        if self._process is not None and self._exit_code is None:
            self._process.kill()

    async def wait_closed(self) -> None:
        """Return once the process is gone and every stream has been answered."""
        await self._closed.wait()

    # ------------------------------------------------------------------------------------------- requests

    def submit(self, requests: Sequence[Submit]) -> TokenStream:
        """Send requests; the one stream of all their deltas. Raises ``EngineDied`` when the process is gone."""
        if not self.alive:
            raise EngineDied("this request", "the engine process is not running")
        stream = TokenStream((r.request_id for r in requests), self.abort, self._forget)
        for request in requests:
            self._streams[request.request_id] = stream
            self._send(request)
        return stream

    def abort(self, request_id: str) -> None:
        """Tell the engine to forget a request and free its pages."""
        self._send(Abort(request_id))

    def profile(self, on: bool) -> None:
        """Begin or end the recording of what the device's driver loads."""
        self._send(Profile(on))

    def fail_all(self, error: FreeTokenError) -> None:
        """Answer every waiting stream with ``error``."""
        for stream in set(self._streams.values()):
            stream.fail(error)

    def _forget(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._streams.pop(request_id, None)

    def _send(self, message: ToEngine) -> None:
        if not self._over:
            self._outbox.put(message)

    # ------------------------------------------------------------------------------------------- news, on the loop

    def _deliver(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            streams = self._streams
            for delta in message.items:
                stream = streams.get(delta.request_id)
                if stream is not None:
                    stream.push(delta)
        elif isinstance(message, RequestFailed):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.fail(RequestRefused(message.status, message.refusal))
        else:
            self._on_message(message)

    def _lost_connection(self) -> None:
        """End of file: nothing more will come. A process that still stands gets a moment to put its things away."""
        self._end()
        self._loop.call_later(_LEAVE_GRACE_S, self.kill)

    def _exited(self, exit_code: int | None) -> None:
        self._exit_code = exit_code if exit_code is not None else -1
        if self._over:
            self._report()
        else:
            # Its last words may still be in the pipe; a grandchild that inherited the pipe must not delay us for ever.
            self._loop.call_later(_EOF_GRACE_S, self._end)

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._outbox.put(None)
        self.fail_all(EngineDied("this request", "the engine process ended while it was running", "send it again"))
        _unblock(self._conn)
        if self._exit_code is not None:
            self._report()

    def _report(self) -> None:
        atexit.unregister(self.kill)
        self._closed.set()
        self._on_exit(describe_exit(self._exit_code))

    # ------------------------------------------------------------------------------------------- threads

    def _read(self) -> None:
        conn = self._conn
        while True:
            try:
                message = conn.recv()
            except (EOFError, OSError):
                self._post(self._lost_connection)
                return
            self._post(self._deliver, message)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._conn.send(message)
            except OSError:  # the reader sees the same end and reports it
                return

    def _watch(self) -> None:
        process = self._process
        assert process is not None, "the watcher starts after the process"
        process.join()
        self._post(self._exited, process.exitcode)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program is ending, nobody waits
            self._loop.call_soon_threadsafe(call, *args)


def describe_exit(exit_code: int | None) -> str:
    """``-9`` → ``"the engine process was killed by SIGKILL"``."""
    if exit_code is None or exit_code >= 0:
        return f"the engine process ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ", which the kernel also sends when memory runs out" if name == "SIGKILL" else ""
    return f"the engine process was killed by {name}{hint}"


def _unblock(conn: Connection) -> None:
    """Make a reader blocked on ``conn`` see the end, also when somebody else holds the far side."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(conn.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
