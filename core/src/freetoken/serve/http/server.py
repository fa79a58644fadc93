"""The HTTP server: one uvicorn in this process, from the bound socket to the drained shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from freetoken.serve.http.app import build_app
from freetoken.serve.http.services import Services
from freetoken.vocab.errors import EngineError, UsageError

_BACKLOG = 2048
_CUT_SHORT_S = 2.0


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket; ``UsageError`` with the fix when the address cannot be had. Port 0 takes any free one."""
    asked = f"--host {host} --port {port}"
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise UsageError(asked, "ports run from 0 to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(asked, f"the host cannot be resolved: {error}", "use --host 127.0.0.1") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_bind(asked, port, error) from None
    return sock


def serve_http(services: Services, host: str, port: int, sock: socket.socket | None = None) -> None:
    """Serve until a signal (SIGINT, SIGTERM) or until the engine will not come back.

    ``sock`` is one from ``bind_socket`` for callers that want the port before they read the checkpoint. Running
    requests may finish within ``limits.drain_s``. Raises ``UsageError`` when the engine refused to start, and
    ``EngineError`` with the reason when it keeps dying.
    """
    sock = bind_socket(host, port) if sock is None else sock
    server = HttpServer(services)
    try:
        server.run(sockets=[sock])
    finally:
        services.engine.kill()  # does nothing after an orderly shutdown
        sock.close()
    if not server.started:
        raise EngineError("start the HTTP server", "its start-up failed", "the log above says why")
    refusal = services.engine.failed
    if refusal is not None:
        kind = UsageError if services.engine.refused else EngineError
        raise kind(refusal.asked, refusal.found, refusal.fix)


class HttpServer(uvicorn.Server):
    """uvicorn that stops when the engine is gone for good, and drains with a deadline."""

    def __init__(self, services: Services) -> None:
        drain_s = services.limits.drain_s
        super().__init__(
            uvicorn.Config(
                build_app(services),
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=math.ceil(drain_s + _CUT_SHORT_S),
                server_header=False,
            )
        )
        self._services = services
        self._drain_s = drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal drains, Ctrl-C once more ends at once. uvicorn's own way raises the signal again after an
        orderly end, which turns it into a traceback."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._follower = asyncio.create_task(self._follow_engine())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engine = self._services.engine
        self._follower.cancel()
        engine.begin_stop()
        cut = asyncio.get_running_loop().call_later(self._drain_s, engine.cut_short)
        await super().shutdown(sockets)
        cut.cancel()
        if self.force_exit:
            await self._end_at_once()

    async def _end_at_once(self) -> None:
        """uvicorn would leave everything as it stands; clients are told and the engine is gone before this returns."""
        engine = self._services.engine
        engine.cut_short()
        engine.kill()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_CUT_SHORT_S)
        await self.lifespan.shutdown()

    async def _follow_engine(self) -> None:
        await self._services.engine.ended.wait()
        self.should_exit = True


def _cannot_bind(asked: str, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(asked, f"port {port} is in use by another process", f"stop it, or take --port {port + 1}")
    if error.errno == errno.EACCES:
        return UsageError(asked, f"port {port} needs more rights", "take a port above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(asked, "this machine has no such address", "use --host 127.0.0.1, or 0.0.0.0 for all")
    return UsageError(asked, f"the address cannot be had: {error.strerror}")
