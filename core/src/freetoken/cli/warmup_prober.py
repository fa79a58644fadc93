"""Sends probes to a server, one after the other, and times the first touch of each and the same again three times."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from attrs import define, field

from freetoken.vocab.errors import EngineError, UsageError
from freetoken.warmup.certificate import AGAIN, LATE_COUNTERS, Certificate, Evidence, Measured, Touch, judge
from freetoken.warmup.manifest import now
from freetoken.warmup.probes import Probe, ServerLimits, probes, tokens

_SETTLE_S = 0.005
"""An engine that has nothing left to do tells its counters at once; this is for their way here."""

PROFILED = 24
"""Further probes, of a seed of their own, each sent once under the profiler, before the timed ones."""

_REQUEST_COST_TOKENS = 512
"""What a request costs beside its tokens, as a number of tokens; the time that is left is estimated with it."""

_STALL = 'freetoken_engine_events_total{name="moe_stall_ms"}'
_NAMES = {
    "freetoken_late_compiles_total": "late_compiles",
    "freetoken_late_loads_total": "late_loads",
    'freetoken_engine_events_total{name="device_used_bytes"}': "device_used_bytes",
    'freetoken_engine_events_total{name="pinned_bytes"}': "pinned_bytes",
    _STALL: "stall_ms",
}

Progress = Callable[[int, float, str], None]
"""Told before each probe: how many are done, the share of all work that they are, and what comes next."""


class Stopped(KeyboardInterrupt):
    """Somebody wants an end now: a signal, or the time that was given."""


@define
class _Run:
    """What is known so far; whatever ends a run, this is judged."""

    measured: list[Measured] = field(factory=list)
    evidence: Evidence | None = None
    before: dict[str, float] = field(factory=dict)


class Prober:
    """One server. Connections are kept, so that no probe pays for opening one. ``until`` is the ``time.monotonic``
    instant at which a run ends, whatever is left of it."""

    def __init__(self, url: str, api_key: str | None, until: float | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        if not parts.hostname:
            raise UsageError(f"verify {url}", "it is no URL of a server", "use for example http://127.0.0.1:1919")
        self._url = url
        self._until = until
        self._connection = kind(parts.hostname, parts.port, timeout=600)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def ready(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self._request("GET", "/ready")[0] == 200
        self._connection.close()
        return False

    def run(self, count: int, seed: int, progress: Progress, profiled: int = PROFILED) -> Certificate:
        """All probes in order. First touches are never retried.

        What ends a run early (``Stopped``, Ctrl-C, a probe that is refused, a server that dies) is told in the
        certificate, which then holds what was found so far. Raises ``EngineError`` where no probe can be sent at all.
        """
        report = self._json("/health")
        limits = server_limits(report)
        run, started, stopped = _Run(before=self.counters()), time.perf_counter(), ""
        try:
            self._run(run, limits, count, seed, progress, profiled)
        except (KeyboardInterrupt, EngineError, OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            stopped = f"stopped after {len(run.measured)} of {count} probes: {why}"
        seconds = time.perf_counter() - started
        after, unread = self._after(run.before)
        return judge(
            model=str(report["model"]),
            fingerprint=str(report.get("warmup_fingerprint", "")),
            written=now(),
            seed=seed,
            measured=run.measured,
            before=run.before,
            after=after,
            limits=limits,
            seconds=seconds,
            evidence=run.evidence,
            stopped="; ".join(text for text in (stopped, unread) if text),
        )

    def _run(self, run: _Run, limits: ServerLimits, count: int, seed: int, progress: Progress, profiled: int) -> None:
        chosen = probes(limits, count, seed)
        if profiled:
            evidence = self._profiled(sample(limits, profiled, seed), limits, seed, progress)
            needless = bool(evidence.because) and "device_used_bytes" not in run.before  # a CPU loads no modules
            run.evidence = None if needless else evidence
            memory = {name: value for name, value in self.counters().items() if name not in LATE_COUNTERS}
            run.before |= memory  # what the profiler took is not the engine's
        chance = random.Random(f"prompts of {seed}")
        # One text for all prefixes: then a longer one is mostly in the cache when a shorter one has been there.
        text = tokens(random.Random(f"prefix of {seed}"), max(p.prefix for p in chosen), limits.vocabulary)
        whole, done = sum(map(_work, chosen)), 0.0
        for probe in chosen:
            words = f"{probe.name}: {probe.new} + {probe.prefix} tokens × {probe.batch}, {probe.sampling}"
            progress(len(run.measured), done / whole, words)
            run.measured.append(self._measure(probe, limits, chance, text[: probe.prefix]))
            done += _work(probe)

    def _after(self, before: Mapping[str, float]) -> tuple[Mapping[str, float], str]:
        """The counters at the end, on a connection of their own, since a run may have ended amid an answer."""
        self._connection.close()
        self._connection.timeout = 10
        self._until = None
        time.sleep(20 * _SETTLE_S)
        try:
            return self.counters(), ""
        except (EngineError, OSError, http.client.HTTPException) as error:
            return before, f"the counters could not be read again: {error}"

    # ------------------------------------------------------------------------------------------- the profiler

    def _profiled(self, chosen: Sequence[Probe], limits: ServerLimits, seed: int, progress: Progress) -> Evidence:
        """First touches under the profiler beside the engine."""
        answer = self._profile(True)
        if "why" in answer:
            return Evidence(because=str(answer["why"]))
        chance = random.Random(f"profiled prompts of {seed}")
        sent = 0
        try:
            for probe in chosen:
                progress(
                    0, 0.0, f"profiled {sent} of {len(chosen)}; {probe.new} + {probe.prefix} tokens × {probe.batch}"
                )
                prefix = tokens(chance, probe.prefix, limits.vocabulary)
                self._prime(prefix)
                self._send(probe.body(chance, limits.vocabulary, prefix))
                sent += 1
        finally:
            found = self._profile(False)
        if "why" in found:
            return Evidence(probes=sent, because=str(found["why"]))
        events = {str(name): int(n) for name, n in dict(found["events"]).items()}
        return Evidence(sent, events, int(found["seen"]))

    def _profile(self, on: bool) -> dict[str, Any]:
        status, answer = self._request("POST", "/warmup/profile", json.dumps({"on": on}))
        if status == 404:
            return {"why": "the server does not offer it; start it with --profile-endpoint"}
        if status != 200:
            return {"why": f"status {status}: {answer[:300].decode(errors='replace')}"}
        found: dict[str, Any] = json.loads(answer)
        return found

    # ------------------------------------------------------------------------------------------- one probe

    def _measure(self, probe: Probe, limits: ServerLimits, chance: random.Random, prefix: Sequence[int]) -> Measured:
        self._prime(prefix)
        touches, late = [], 0
        before = self.counters()
        for touch in range(1 + AGAIN):
            ms = self._send(probe.body(chance, limits.vocabulary, prefix))
            stalls = "stall_ms" in before
            if touch and not stalls:  # nothing to read
                touches.append(Touch(ms))
                continue
            time.sleep(_SETTLE_S)
            after = self.counters()
            touches.append(Touch(ms, after.get("stall_ms", 0.0) - before.get("stall_ms", 0.0)))
            if touch == 0:
                late = int(sum(after[name] - before[name] for name in LATE_COUNTERS))
            before = after
        return Measured(probe, tuple(touches), late)

    def _prime(self, prefix: Sequence[int]) -> None:
        """Bring a prefix into the cache; a prompt goes on after it, so that it is never all of one."""
        if prefix:
            self._send({"prompt": list(prefix), "max_tokens": 1, "temperature": 0})

    def _send(self, body: Mapping[str, Any]) -> float:
        """One completion; milliseconds until all of it is there."""
        if self._until is not None and time.monotonic() >= self._until:
            raise Stopped("the time that was given is over")
        payload = json.dumps(body)
        started = time.perf_counter()
        status, answer = self._request("POST", "/v1/completions", payload)
        ms = (time.perf_counter() - started) * 1000
        if status != 200:
            said = answer[:300].decode(errors="replace")
            raise EngineError(f"a probe of {self._url}", f"it was answered with status {status}: {said}")
        return ms

    def counters(self) -> dict[str, float]:
        """The server's counters and gauges that a certificate looks at, by short name."""
        status, answer = self._request("GET", "/metrics")
        if status != 200:
            raise EngineError(f"{self._url}/metrics", f"status {status}", "give the server's key with --api-key")
        found = {}
        for line in answer.decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name in _NAMES:
                found[_NAMES[name]] = float(value)
        return found

    def _json(self, path: str) -> dict[str, Any]:
        status, answer = self._request("GET", path)
        if status != 200:
            raise EngineError(f"{self._url}{path}", f"status {status}: {answer[:200].decode(errors='replace')}")
        report: dict[str, Any] = json.loads(answer)
        return report

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        self._connection.request(method, path, body, self._headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()


def sample(limits: ServerLimits, count: int, seed: int) -> tuple[Probe, ...]:
    """Probes for the profiler: of another seed, and none so long that its records would take minutes to read."""
    short = [p for p in probes(limits, 8 * count, seed + 1) if p.new * p.batch <= limits.chunk + 1]
    return tuple(random.Random(f"sample of {seed}").sample(short, min(count, len(short))))


def _work(probe: Probe) -> float:
    """What a probe takes, in the time of one token."""
    return probe.computed_tokens + (1 + AGAIN) * _REQUEST_COST_TOKENS


def server_limits(report: Mapping[str, Any]) -> ServerLimits:
    """From ``/health``. Raises ``EngineError`` where the server is not one of this version, or is not ready."""
    limits = report.get("limits")
    if not isinstance(limits, dict):
        raise EngineError("a server to verify", f"its /health tells no limits (status {report.get('status')!r})")
    return ServerLimits(
        longest=int(limits["max_seq_tokens"]),
        chunk=int(limits["max_prefill_tokens"]),
        running=int(limits["max_running_requests"]),
        page=int(limits["page_tokens"]),
        vocabulary=int(limits["vocab_size"]),
        kv_tokens=int(limits["kv_tokens"]),
    )
