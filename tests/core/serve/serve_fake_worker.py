"""A stand-in for the engine process: it speaks the real messages over the real pipe and answers by a script."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing.connection import Connection

from attrs import define, field, frozen

from freetoken.serve.messages import (
    Abort,
    Delta,
    Deltas,
    EngineStats,
    Profile,
    ProfileAnswer,
    Progress,
    Ready,
    RequestFailed,
    Shutdown,
    StartFailed,
    Submit,
    TokenLogprob,
)
from freetoken.vocab.errors import Refusal

EOS = 256
VOCAB = 260
TARGET = "serve_fake_worker:fake_worker"


@frozen
class FakeStart:
    """``answer`` is what every request gets, byte by byte, then the end token. ``fail_word`` in a prompt makes the
    engine refuse that request; ``die_word`` makes the process die. ``start`` is ``ok``, ``crash``, ``refuse`` or
    ``retry``."""

    answer: str = "Hello, wörld! This is a scripted answer."
    step_s: float = 0.0
    start: str = "ok"
    start_s: float = 0.0
    vocab_size: int = VOCAB
    max_running: int = 64
    max_seq_tokens: int = 4096
    fail_word: str = "FAIL"
    die_word: str = "DIE"


@define
class _Running:
    submit: Submit
    sent: int = 0


@define
class _Fake:
    conn: Connection
    start: FakeStart
    running: dict[str, _Running] = field(factory=dict)
    aborts: int = 0
    submits: int = 0
    profiled: int | None = None

    def run(self) -> None:
        script = [*self.start.answer.encode(), EOS]
        while True:
            while self.conn.poll(None if not self.running else 0):
                message = self.conn.recv()
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            if self.running:
                time.sleep(self.start.step_s)
                self._step(script)

    def _take(self, message: object) -> None:
        if isinstance(message, Abort):
            self.aborts += self.running.pop(message.request_id, None) is not None
        elif isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Profile):
            self._profile(message.on)
        self._send_stats()

    def _profile(self, on: bool) -> None:
        """Every request that came meanwhile loaded a module; a second begin is refused."""
        if on and self.profiled is not None:
            self.conn.send(ProfileAnswer(on, why="one is under way already"))
        elif on:
            self.profiled = self.submits
            self.conn.send(ProfileAnswer(on))
        else:
            count, self.profiled = self.submits - (self.profiled or 0), None
            self.conn.send(ProfileAnswer(on, (("Lazy Function Loading", count),), 100))

    def _send_stats(self) -> None:
        self.conn.send(
            EngineStats(
                running=len(self.running),
                kv_pages_used=7 * len(self.running),
                kv_pages_total=100,
                prefix_hit_tokens=3,
                counters=(("aborts", self.aborts), ("submits", self.submits)),
            )
        )

    def _submit(self, submit: Submit) -> None:
        self.submits += 1
        text = bytes(t for t in submit.prompt if t < 256).decode("utf-8", "replace")
        if self.start.die_word in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.start.fail_word in text:
            self.conn.send(RequestFailed(submit.request_id, 500, Refusal("this request", "a plugin raised: boom")))
            return
        self.running[submit.request_id] = _Running(submit)

    def _step(self, script: list[int]) -> None:
        deltas = []
        for request_id, running in list(self.running.items()):
            delta = self._delta(request_id, running, script)
            deltas.append(delta)
            if delta.finish:
                del self.running[request_id]
        self.conn.send(Deltas(tuple(deltas)))
        if any(delta.finish for delta in deltas):
            self._send_stats()

    def _delta(self, request_id: str, running: _Running, script: list[int]) -> Delta:
        params, deadline = running.submit.params, running.submit.deadline
        if deadline is not None and time.monotonic() >= deadline:
            return Delta(request_id, (), "deadline")
        token = script[running.sent % len(script)]
        running.sent += 1
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
        finish = "stop" if token in stops else "length" if running.sent == params.max_tokens else ""
        logprobs = ()
        if params.logprobs is not None:
            top = tuple((token + i, -0.5 - i) for i in range(params.logprobs))
            logprobs = (TokenLogprob(token, -0.5, top),)
        return Delta(request_id, (token,), finish, logprobs, cached_tokens=2 if running.sent == 1 else 0)


def fake_worker(conn: Connection, start: FakeStart) -> None:
    """The process's main function."""
    time.sleep(start.start_s / 2)
    conn.send(Progress("weights", 0.5, "half of them"))
    time.sleep(start.start_s / 2)
    if start.start == "crash":
        os._exit(7)
    if start.start in ("refuse", "retry"):
        refusal = Refusal("serve this model", "it takes 99 GiB and there are 2", "take a smaller one")
        conn.send(StartFailed(refusal, retry=start.start == "retry"))
        return
    conn.send(Ready("fake", start.max_seq_tokens, start.max_running, 1 << 20, start.vocab_size, 0.1, (("fake", "1"),)))
    with contextlib.suppress(EOFError, OSError):
        _Fake(conn, start).run()
