"""Compiling keys into Triton's disk cache in worker processes without torch and without a device context.

Workers meet the engine in the disk cache (``TRITON_CACHE_DIR`` as everywhere in Triton). Each is a plain child of the
interpreter that runs this file's ``main``: requests in and results out as pickles over its pipes, so that a worker that
dies costs the one key it was at, which another worker takes over.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any

from attrs import field, frozen

from freetoken.ops.triton_stub import CompileRequest
from freetoken.vocab.errors import EngineError

LAUNCHER_BUILT = "built"
LAUNCHER_NOT_NEEDED = "not needed"
LAUNCHER_LEFT = "left"

MAX_ATTEMPTS = 2


@frozen
class CompileResult:
    """What became of one key. ``cache_hit`` means that the disk had it already; then ``seconds`` is the reading.

    ``launcher`` says whether the C stub that Triton 3.6 builds for each signature is there: ``"built"``,
    ``"not needed"`` (3.7 and newer have one for all), or ``"left"`` with the reason in ``launcher_note``.
    """

    key: str
    seconds: float
    cache_hit: bool
    launcher: str = LAUNCHER_NOT_NEEDED
    launcher_note: str = ""
    shared_memory_bytes: int = 0
    error: str = ""


@frozen
class CompileReport:
    """All results in the order of the requests, the wall time, and how many workers died on the way."""

    results: tuple[CompileResult, ...]
    seconds: float
    workers_lost: int = 0

    @property
    def compiled(self) -> int:
        return sum(not r.cache_hit and not r.error for r in self.results)

    @property
    def hits(self) -> int:
        return sum(r.cache_hit for r in self.results)

    @property
    def errors(self) -> tuple[CompileResult, ...]:
        return tuple(r for r in self.results if r.error)

    @property
    def launchers_left(self) -> int:
        return sum(r.launcher == LAUNCHER_LEFT for r in self.results)

    def __str__(self) -> str:
        left = f", launchers of {self.launchers_left} left to a machine with a driver" if self.launchers_left else ""
        return f"{self.compiled} compiled, {self.hits} in the cache, {len(self.errors)} failed{left}"


@frozen
class _Hello:
    """What a worker is sent first."""

    path: tuple[str, ...]
    triton_key: str = field(repr=False)


def compile_requests(
    requests: Sequence[CompileRequest],
    workers: int,
    progress: Callable[[CompileResult], None] | None = None,
) -> CompileReport:
    """Compile ``requests`` in ``workers`` processes, in the order given; returns when all are done.

    A key whose compile fails is a result with ``error``; one whose worker died is tried again in a fresh one, and is an
    error after the second death. ``progress`` is called for each result, from a thread of its own. Raises
    ``EngineError`` when no worker can be started at all.
    """
    started = time.perf_counter()
    queue = deque((index, 0) for index in range(len(requests)))
    pool = _Pool(requests, queue, progress)
    threads = [threading.Thread(target=pool.serve, daemon=True) for _ in range(max(1, min(workers, len(requests))))]
    for thread in threads if requests else ():
        thread.start()
    for thread in threads if requests else ():
        thread.join()
    if pool.broken:
        raise EngineError("compile workers", pool.broken, "see the worker's own message above")
    results = tuple(pool.results[index] for index in range(len(requests)))
    return CompileReport(results, time.perf_counter() - started, pool.lost)


class _Pool:
    """The parent's side: one thread a worker, one queue of work."""

    def __init__(
        self,
        requests: Sequence[CompileRequest],
        queue: deque[tuple[int, int]],
        progress: Callable[[CompileResult], None] | None,
    ) -> None:
        self.results: dict[int, CompileResult] = {}
        self.lost = 0
        self.broken = ""
        self._requests = requests
        self._queue = queue
        self._progress = progress
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Run one worker after another until the queue is empty."""
        while self._queue and not self.broken:
            worker = _Worker()
            try:
                if not worker.ready():
                    with self._lock:
                        self.broken = f"a worker ended with status {worker.end()} before its first key"
                    return
                self._feed(worker)
            finally:
                worker.end()

    def _feed(self, worker: _Worker) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                index, attempts = self._queue.popleft()
            result = worker.compile(self._requests[index])
            if result is not None:
                self._done(index, result)
                continue
            with self._lock:
                self.lost += 1
                if attempts + 1 < MAX_ATTEMPTS:
                    self._queue.appendleft((index, attempts + 1))
                    return
            status = worker.end()
            self._done(
                index, CompileResult(self._requests[index].key, 0.0, False, error=f"its worker died, status {status}")
            )
            return

    def _done(self, index: int, result: CompileResult) -> None:
        with self._lock:
            self.results[index] = result
        if self._progress is not None:
            self._progress(result)


class _Worker:
    """One child process, seen from the parent."""

    def __init__(self) -> None:
        from triton.runtime.cache import triton_key

        # A child of the bare interpreter: nothing of this process is imported there, and torch is never.
        command = [sys.executable, "-c", "from freetoken.warmup.compile_worker import main; main()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._send(_Hello(tuple(sys.path), triton_key()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> bool:
        return self._receive() == "ready"

    def compile(self, request: CompileRequest) -> CompileResult | None:
        """The result, or ``None`` when the worker died over it."""
        self._send(request)
        found = self._receive()
        return found if isinstance(found, CompileResult) else None

    def end(self) -> int:
        """Close the pipes and wait; a worker that does not go is killed."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it died with a request in the pipe; its status says so
                self._process.stdin.close()
        try:
            return self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(value, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # the following receive reports the death

    def _receive(self) -> object:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            return None


# ------------------------------------------------------------------------------------------------ the child's side


def main() -> None:
    """The worker: read requests from standard input until it closes, answer each on standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever compilers print goes to the error stream, not between the pickles
    requests = sys.stdin.buffer
    hello = pickle.load(requests)
    sys.path[:] = hello.path
    _adopt_triton_key(hello.triton_key)
    _answer(answers, "ready")
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        _answer(answers, compile_one(request))


def _answer(answers: IO[bytes], value: object) -> None:
    pickle.dump(value, answers)
    answers.flush()


def _adopt_triton_key(key: str) -> None:
    """Take the parent's hash of Triton itself instead of hashing its half gigabyte again in every worker."""
    from triton.compiler import compiler
    from triton.runtime import cache

    for module in (cache, compiler):
        if hasattr(module, "triton_key"):
            module.triton_key = lambda: key


def compile_one(request: CompileRequest) -> CompileResult:
    """Compile one request in this process, into the disk cache; touches no device."""
    started = time.perf_counter()
    hit = False

    def listen(*, cache_hit: bool, **_: object) -> None:
        nonlocal hit
        hit = cache_hit

    import triton
    from triton import knobs
    from triton.compiler import ASTSource

    from freetoken.ops.triton_stub import jit_function

    before = knobs.compilation.listener
    knobs.compilation.listener = listen
    try:
        source = ASTSource(
            jit_function(request.kernel), dict(request.signature), dict(request.constants), dict(request.attrs)
        )
        target = request.target.gpu_target()
        compiled = triton.compile(source, target=target, options=dict(request.options))
        launcher, note = _build_launcher(source, compiled)
    except Exception as error:  # the caller decides what a failed key means; it must know which and why
        return CompileResult(
            request.key, time.perf_counter() - started, False, error=f"{type(error).__name__}: {error}"
        )
    finally:
        knobs.compilation.listener = before
    seconds = time.perf_counter() - started
    return CompileResult(request.key, seconds, hit, launcher, note, int(compiled.metadata.shared))


def _build_launcher(source: Any, compiled: Any) -> tuple[str, str]:
    """Build the C launcher that Triton 3.6 makes for each signature; newer versions have one for all."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):
        return LAUNCHER_NOT_NEEDED, ""
    try:
        driver.CudaLauncher(source, compiled.metadata)
    except Exception as error:
        return LAUNCHER_LEFT, str(error).strip().partition("\n")[0]
    return LAUNCHER_BUILT, ""


def default_workers(cores: int, free_bytes: int) -> int:
    """min(cores, free memory ÷ 1.5 GB), at least one: what a compile worker takes at its largest."""
    return max(1, min(cores, free_bytes // 1_500_000_000))
