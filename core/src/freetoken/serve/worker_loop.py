"""The engine process's loop: take messages, step the engine, answer."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from multiprocessing.connection import Connection

from attrs import define, field

from freetoken.run.device_counters import memory_counters
from freetoken.run.module_profiler import ModuleProfiler, module_profiler
from freetoken.run.sampler import ChosenLogprob
from freetoken.schedule.engine_core import Output
from freetoken.serve.engine_start import RunningEngine
from freetoken.serve.messages import (
    Abort,
    Delta,
    Deltas,
    EngineStats,
    Profile,
    ProfileAnswer,
    Ready,
    RequestFailed,
    Shutdown,
    Submit,
    ToEngine,
    TokenLogprob,
)
from freetoken.vocab.errors import UsageError

_STATS_PERIOD_S = 1.0
_log = logging.getLogger("freetoken.engine")


def ready_message(running: RunningEngine, seconds: float) -> Ready:
    plan = running.plan
    return Ready(
        model=plan.served_name,
        max_seq_tokens=running.built.max_context_tokens,
        max_running_requests=running.sizing.max_running_requests,
        kv_tokens=running.sizing.kv_tokens,
        vocab_size=plan.model.vocab_size,
        seconds=seconds,
        plugins=tuple((r.name, r.version) for r in running.plugins.records.values() if r.state == "active"),
        fingerprint=running.fingerprint,
        max_prefill_tokens=running.sizing.max_prefill_tokens,
        page_tokens=running.sizing.page_tokens,
    )


@define
class WorkerLoop:
    """One thread reads the pipe into a queue; this one steps the engine and answers."""

    conn: Connection
    running: RunningEngine
    inbox: queue.SimpleQueue[ToEngine | None] = field(factory=queue.SimpleQueue)
    draining: bool = False
    next_stats: float = 0.0
    profiler: ModuleProfiler = field(init=False)

    @profiler.default
    def _own_profiler(self) -> ModuleProfiler:
        return module_profiler(self.running.plan.device)

    def run(self) -> None:
        threading.Thread(target=self._receive, daemon=True, name="receive").start()
        core = self.running.core
        while self._take_messages(block=core.idle):
            if core.idle:
                if self.draining:
                    return
                continue
            self._send(core.step())
            self._send_stats()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.inbox.put(self.conn.recv())
        self.inbox.put(None)

    def _take_messages(self, block: bool) -> bool:
        """Handle everything that has come; with ``block`` wait for the first. ``False`` means stop now."""
        if block and self.draining:
            return True
        if block:
            self._send_stats(force=True)
        try:
            message = self.inbox.get(block=block)
            while True:
                if not self._handle(message):
                    return False
                message = self.inbox.get_nowait()
        except queue.Empty:
            return True

    def _handle(self, message: ToEngine | None) -> bool:
        if message is None:
            return False
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self.running.core.abort(message.request_id)
        elif isinstance(message, Profile):
            self.conn.send(self._profile(message.on))
        elif isinstance(message, Shutdown):
            self.draining = True
            return message.drain
        return True

    def _profile(self, on: bool) -> ProfileAnswer:
        """What goes wrong is the asker's to know; requests go on."""
        try:
            if on:
                self.profiler.begin()
                return ProfileAnswer(on)
            found = self.profiler.end()
        except Exception as error:
            _log.exception("the profiler")
            return ProfileAnswer(on, why=str(error))
        return ProfileAnswer(on, tuple(sorted(found.events.items())), found.seen)

    def _submit(self, message: Submit) -> None:
        try:
            self.running.core.submit(message.request_id, message.prompt, message.params, message.deadline)
        except UsageError as error:
            self.conn.send(RequestFailed(message.request_id, 400, error.refusal))

    def _send(self, outputs: list[Output]) -> None:
        deltas = []
        for output in outputs:
            if output.error is not None:
                self.conn.send(RequestFailed(output.request_id, 500, output.error))
            else:
                deltas.append(_delta(output))
        if deltas:
            self.conn.send(Deltas(tuple(deltas)))

    def _send_stats(self, force: bool = False) -> None:
        now = time.monotonic()
        if now >= self.next_stats or force:
            self.next_stats = now + _STATS_PERIOD_S
            self.conn.send(engine_stats(self.running))


def _delta(output: Output) -> Delta:
    logprobs = tuple(
        TokenLogprob(item.token, item.logprob, item.top) for item in output.logprobs if isinstance(item, ChosenLogprob)
    )
    return Delta(output.request_id, output.tokens, output.finish, logprobs, output.cached_tokens)


def engine_stats(running: RunningEngine) -> EngineStats:
    """The gauges and counters as they stand."""
    core = running.core
    cache = running.built.cache.stats()
    moe = running.built.moe.stats() if running.built.moe is not None else None
    counters = memory_counters(running.plan.device)
    if moe is not None:
        counters = (
            *counters,
            *((f"moe_moved_bytes_{cause}", float(n)) for cause, n in sorted(moe.moved_bytes.items())),
            ("moe_hits", float(moe.hits)),
            ("moe_misses", float(moe.misses)),
            ("moe_stall_ms", moe.stall_ms),
            ("moe_wasted_bytes", float(moe.wasted_bytes)),
        )
    return EngineStats(
        running=len(core.scheduler.running),
        waiting=len(core.scheduler.waiting),
        kv_pages_used=cache.pages_used,
        kv_pages_cached=cache.pages_cached,
        kv_pages_total=cache.pages_total,
        prefix_hit_tokens=cache.hit_tokens,
        prefix_query_tokens=cache.query_tokens,
        steps=core.steps,
        preemptions=core.scheduler.preemptions,
        late_compiles=core.late.watch.compiles,
        late_loads=core.late.watch.loads,
        counters=counters,
    )
