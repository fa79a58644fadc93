"""Sends probes to a server, one after the other, and times the first touch of each and the same again three times."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from freetoken.vocab.errors import EngineError, UsageError
from freetoken.warmup.certificate import AGAIN, Certificate, Measured, Touch, judge
from freetoken.warmup.manifest import now
from freetoken.warmup.probes import Probe, ServerLimits, probes, tokens

_SETTLE_S = 0.02
_STALL = 'freetoken_engine_events_total{name="moe_stall_ms"}'
_NAMES = {
    "freetoken_late_compiles_total": "late_compiles",
    "freetoken_late_loads_total": "late_loads",
    'freetoken_engine_events_total{name="device_used_bytes"}': "device_used_bytes",
    'freetoken_engine_events_total{name="pinned_bytes"}': "pinned_bytes",
    _STALL: "stall_ms",
}


class Prober:
    """One server. Connections are kept, so that no probe pays for opening one."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        if not parts.hostname:
            raise UsageError(f"verify {url}", "it is no URL of a server", "use for example http://127.0.0.1:1919")
        self._url = url
        self._connection = kind(parts.hostname, parts.port, timeout=600)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def ready(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self._request("GET", "/ready")[0] == 200
        self._connection.close()
        return False

    def run(self, count: int, seed: int, progress: Callable[[int, str], None]) -> Certificate:
        """All probes in order. First touches are never retried. Raises ``EngineError`` when a probe is refused."""
        report = self._json("/health")
        limits = server_limits(report)
        chance = random.Random(f"prompts of {seed}")
        before, started = self.counters(), time.perf_counter()
        measured = []
        for done, probe in enumerate(probes(limits, count, seed)):
            progress(done, f"{probe.name}: {probe.new} + {probe.prefix} tokens × {probe.batch}, {probe.sampling}")
            measured.append(self._measure(probe, limits, chance))
        seconds = time.perf_counter() - started
        time.sleep(10 * _SETTLE_S)
        return judge(
            model=str(report["model"]),
            fingerprint=str(report.get("warmup_fingerprint", "")),
            written=now(),
            seed=seed,
            measured=measured,
            before=before,
            after=self.counters(),
            limits=limits,
            seconds=seconds,
        )

    def _measure(self, probe: Probe, limits: ServerLimits, chance: random.Random) -> Measured:
        prefix = tokens(chance, probe.prefix, limits.vocabulary)
        if prefix:  # bring it into the cache; the last token is left out, so that the prompt is never the whole of it
            self._send({"prompt": prefix, "max_tokens": 1, "temperature": 0})
        touches, late = [], 0
        for touch in range(1 + AGAIN):
            body = probe.body(chance, limits.vocabulary, prefix)
            before = self.counters()
            ms = self._send(body)
            time.sleep(_SETTLE_S)
            after = self.counters()
            touches.append(Touch(ms, after.get("stall_ms", 0.0) - before.get("stall_ms", 0.0)))
            if touch == 0:
                late = int(sum(after[name] - before[name] for name in ("late_compiles", "late_loads")))
        return Measured(probe, tuple(touches), late)

    def _send(self, body: Mapping[str, Any]) -> float:
        """One completion; milliseconds until all of it is there."""
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
