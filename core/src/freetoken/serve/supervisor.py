"""The supervisor: keeps one engine process running, restarts it when it dies, and gives up on a crash loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve, frozen

from freetoken.serve.child import WorkerTarget
from freetoken.serve.client import EngineClient, EngineProcess, StatusMessage
from freetoken.serve.messages import EngineStats, ProfileAnswer, Ready, StartFailed, Submit
from freetoken.serve.stream import TokenStream
from freetoken.vocab.errors import EngineError, Refusal

_log = logging.getLogger("freetoken.engine")

SERVING, STARTING, RESTARTING, STOPPING, DEAD = "serving", "starting", "restarting", "stopping", "dead"


class EngineUnavailable(EngineError):
    """No engine serves right now; ``code`` is ``engine_starting``, ``engine_dead`` or ``shutting_down``."""

    def __init__(self, code: str, found: str, fix: str = "") -> None:
        super().__init__("this request", found, fix)
        self.code = code


@frozen
class RestartPolicy:
    """Back-off in seconds: ``first``, doubling to ``longest``. ``healthy`` seconds of service forget earlier failures;
    ``max_failures`` in a row end it."""

    first: float = 1.0
    longest: float = 30.0
    healthy: float = 60.0
    max_failures: int = 5


@frozen
class NextTry:
    """Restart after ``delay_s``, or never (``None``), because of ``reason``."""

    delay_s: float | None
    failures: int
    reason: str


def next_try(policy: RestartPolicy, failures: int, served_s: float, reason: str) -> NextTry:
    """What follows a death. ``failures``: those in a row before this one; ``served_s``: how long this life served."""
    now = 1 if served_s >= policy.healthy else failures + 1
    if now >= policy.max_failures:
        text = f"{reason}; {now} failures without {policy.healthy:g} s of service between them, so no further restart"
        return NextTry(None, now, text)
    return NextTry(min(policy.longest, policy.first * 2 ** (now - 1)), now, reason)


@frozen
class EngineStatus:
    """Where the engine stands. ``phase`` is ``serving``, ``restarting``, ``stopping``, ``dead``, or the name of the
    start's stage; ``ready`` holds the limits once known, and stays ``None`` while nothing serves."""

    phase: str = STARTING
    fraction: float = 0.0
    detail: str = ""
    ready: Ready | None = None
    reason: str = ""
    restarts: int = 0
    since: float = 0.0


class Supervisor:
    """Owns the life of the engine. All methods belong to the event loop's thread.

    ``spawned`` is a process that runs already and becomes the first life: a command may start it before it reads the
    text side of the checkpoint. ``on_status`` is told every change (the CLI prints them). ``failed`` holds the refusal
    once the engine will not come back: a start that cannot succeed (``StartFailed`` without ``retry``) or a crash loop;
    ``refused`` tells the first.
    """

    def __init__(
        self,
        target: WorkerTarget,
        start: object,
        policy: RestartPolicy = RestartPolicy(),
        on_status: Callable[[EngineStatus], None] | None = None,
        spawned: EngineProcess | None = None,
    ) -> None:
        self._spawned = spawned
        self._target = target
        self._start_value = start
        self._policy = policy
        self._on_status = on_status
        self._client: EngineClient | None = None
        self._failures = 0
        self._serving_since: float | None = None
        self._start_failed: StartFailed | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._profile: asyncio.Future[ProfileAnswer] | None = None
        self.status = EngineStatus(since=time.monotonic())
        self.stats = EngineStats()
        self.failed: Refusal | None = None
        self.refused = False
        self.ended = asyncio.Event()

    # ------------------------------------------------------------------------------------------- for the endpoints

    @property
    def serving(self) -> bool:
        return self.status.phase == SERVING

    def limits(self) -> Ready:
        """The serving engine's limits. Raises ``EngineUnavailable`` when there is none."""
        if self.status.ready is None or self.status.phase != SERVING:
            raise self._unavailable()
        return self.status.ready

    def submit(self, requests: Sequence[Submit]) -> TokenStream:
        """Send requests to the engine. Raises ``EngineUnavailable`` when none serves."""
        if self._client is None or self.status.phase != SERVING:
            raise self._unavailable()
        return self._client.submit(requests)

    async def profile(self, on: bool) -> ProfileAnswer:
        """Have the engine begin or end its record of what the driver loads. Raises ``EngineUnavailable`` when none
        serves, or when it ends before it answers."""
        if self._client is None or self.status.phase != SERVING:
            raise self._unavailable()
        if self._profile is not None:
            return ProfileAnswer(on, why="another request to begin or end a record is under way")
        self._profile = asyncio.get_running_loop().create_future()
        try:
            self._client.profile(on)
            return await self._profile
        finally:
            self._profile = None

    def _unavailable(self) -> EngineUnavailable:
        status = self.status
        if status.phase == DEAD:
            return EngineUnavailable("engine_dead", f"the engine has stopped: {status.reason}")
        if status.phase == STOPPING:
            return EngineUnavailable("shutting_down", "the server is shutting down")
        if status.phase == RESTARTING or status.reason:
            return EngineUnavailable("engine_dead", f"the engine is being restarted: {status.reason}", "try again soon")
        found = f"the engine is still starting ({status.phase}, {status.fraction:.0%})"
        return EngineUnavailable("engine_starting", found, "wait until /ready answers 200")

    # ------------------------------------------------------------------------------------------- life

    @property
    def engine_pid(self) -> int | None:
        return None if self._client is None else self._client.pid

    def start(self) -> None:
        """Launch the engine process; from here on it is kept alive."""
        self._restart = None
        self._start_failed = None
        self._serving_since = None
        self.stats = EngineStats()
        self._client = EngineClient(self._target, self._start_value, self._on_message, self._on_exit)
        self._set(phase=STARTING, fraction=0.0, detail="")
        spawned, self._spawned = self._spawned, None
        self._client.launch(spawned)

    def begin_stop(self) -> None:
        """Take no new requests; those running go on."""
        if self.status.phase not in (STOPPING, DEAD):
            self._set(phase=STOPPING)
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None

    def cut_short(self) -> None:
        """The drain's deadline has passed: answer whoever still waits."""
        if self._client is not None:
            self._client.fail_all(EngineUnavailable("shutting_down", "the server is shutting down", "send it again"))

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the engine process: politely, then with SIGKILL after ``grace_s``."""
        self.begin_stop()
        client = self._client
        if client is None or not client.alive:
            return
        if self.status.ready is None:  # a start listens to nobody
            client.kill()
        client.shutdown(drain=False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.wait_closed(), grace_s)
            return
        client.kill()
        await client.wait_closed()

    def kill(self) -> None:
        """End the engine process at once; the last resort of a program that is leaving."""
        self.begin_stop()
        if self._client is not None:
            self._client.kill()

    # ------------------------------------------------------------------------------------------- news

    def _on_message(self, message: StatusMessage) -> None:
        if isinstance(message, EngineStats):
            self.stats = message
        elif isinstance(message, StartFailed):
            self._start_failed = message
        elif isinstance(message, ProfileAnswer):
            if self._profile is not None and not self._profile.done():
                self._profile.set_result(message)
        elif self.status.phase == STOPPING:
            return
        elif isinstance(message, Ready):
            self._serving_since = time.monotonic()
            self._set(phase=SERVING, fraction=1.0, detail="", ready=message, reason="")
        elif self.status.phase != SERVING:  # late progress must not take the engine out of service
            self._set(phase=message.phase, fraction=message.fraction, detail=message.detail)

    def _on_exit(self, reason: str) -> None:
        if self._profile is not None and not self._profile.done():
            self._profile.set_exception(EngineUnavailable("engine_dead", f"the engine ended amid a record: {reason}"))
        if self.status.phase == STOPPING:
            self.ended.set()
            return
        failure = self._start_failed
        if failure is not None:
            reason = str(failure.refusal)
            if not failure.retry:
                self._give_up(failure.refusal, refused=True)
                return
        served_s = 0.0 if self._serving_since is None else time.monotonic() - self._serving_since
        decision = next_try(self._policy, self._failures, served_s, reason)
        self._failures = decision.failures
        if decision.delay_s is None:
            self._give_up(Refusal("keep the engine running", decision.reason, "see the log above"), refused=False)
            return
        _log.error("%s; starting it again in %.1f s", reason, decision.delay_s)
        self._set(
            phase=RESTARTING, fraction=0.0, detail="", ready=None, reason=reason, restarts=self.status.restarts + 1
        )
        self._restart = asyncio.get_running_loop().call_later(decision.delay_s, self.start)

    def _give_up(self, refusal: Refusal, refused: bool) -> None:
        self.failed, self.refused = refusal, refused
        _log.error("the engine has stopped: %s", refusal)
        self._set(phase=DEAD, fraction=0.0, detail="", ready=None, reason=str(refusal))
        self.ended.set()

    def _set(self, **changes: Any) -> None:
        self.status = evolve(self.status, since=time.monotonic(), **changes)
        if self._on_status is not None:
            self._on_status(self.status)
