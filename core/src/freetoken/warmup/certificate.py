"""What probing a server proved: how many probes, what was met late, every first touch slower than later ones.

The judgement is pure: measurements in, certificate out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from freetoken.warmup.probes import TOUCHES, Probe, ServerLimits

SLOWER_RATIO = 0.15
SLOWER_MS = 5.0
AGAIN = TOUCHES - 1
"""A probe's first touch is compared with the slowest of the next three: first − m ≤ max(15 % of m, 5 ms)."""

ENOUGH_PROBES = 200
GROWTH_BYTES = 0

LATE_COUNTERS = ("late_compiles", "late_loads")
MEMORY_GAUGES = ("device_used_bytes", "pinned_bytes")


@frozen
class Touch:
    """One timed answer, and how long transfers stalled it (a MoE strategy's counter)."""

    ms: float
    stall_ms: float = 0.0

    @property
    def own_ms(self) -> float:
        return max(0.0, self.ms - self.stall_ms)


@frozen
class Measured:
    """One probe's touches in order: the first, then those after it; ``late`` are events counted during the first."""

    probe: Probe
    touches: tuple[Touch, ...]
    late: int = 0

    @property
    def first_ms(self) -> float:
        return self.touches[0].own_ms

    @property
    def slowest_again_ms(self) -> float:
        return max(touch.own_ms for touch in self.touches[1:])

    @property
    def excess_ms(self) -> float:
        return self.first_ms - self.slowest_again_ms

    @property
    def allowed_ms(self) -> float:
        return max(SLOWER_RATIO * self.slowest_again_ms, SLOWER_MS)

    @property
    def slow(self) -> bool:
        return self.excess_ms > self.allowed_ms


@frozen
class Evidence:
    """What a profiler of the device recorded beside the engine while ``probes`` were touched for the first time.

    ``events`` counts modules and functions that the driver loaded then, by the profiler's names; ``seen`` is all it
    recorded, so that one that records nothing proves nothing. ``because`` says why there is none.
    """

    probes: int = 0
    events: Mapping[str, int] = attrs.field(factory=dict)
    seen: int = 0
    because: str = ""

    @property
    def failures(self) -> tuple[str, ...]:
        if self.because:
            return (f"no profiler evidence: {self.because}",)
        if not self.seen:
            return ("no profiler evidence: the profiler recorded nothing at all",)
        met = [(name, n) for name, n in sorted(self.events.items()) if n]
        return tuple(f"{n} × {name} in the profiler's record of {self.probes} probes" for name, n in met)


@frozen
class Certificate:
    """``failures`` is empty when it passes. ``up_to_tokens`` bounds what it says; ``counters`` are the differences."""

    model: str
    fingerprint: str
    written: str
    seed: int
    probes: int
    up_to_tokens: int
    counters: Mapping[str, float]
    failures: tuple[str, ...]
    slow: tuple[Mapping[str, Any], ...] = ()
    worst_excess_ms: float = 0.0
    seconds: float = 0.0
    limits: Mapping[str, int] = attrs.field(factory=dict)
    evidence: Evidence | None = None
    stopped: str = ""

    @property
    def passes(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        verdict = "certified" if self.passes else "not certified"
        lines = [
            f"{self.model}: {verdict} for prompts up to {self.up_to_tokens} tokens: {self.probes} probes in "
            f"{self.seconds:.0f} s, seed {self.seed}",
            "  " + ", ".join(f"{name} {value:g}" for name, value in self.counters.items()),
            f"  the slowest first touch took {self.worst_excess_ms:.1f} ms longer than the same again",
        ]
        if self.evidence is not None and self.evidence.seen:
            loaded = ", ".join(f"{name} {n}" for name, n in sorted(self.evidence.events.items()))
            lines.append(f"  profiled {self.evidence.probes} probes, {self.evidence.seen} records: {loaded}")
        lines += [f"  {failure}" for failure in self.failures]
        lines += [
            f"    {s['name']}: {s['new']} new tokens after {s['prefix']}, batch {s['batch']}, {s['sampling']}: "
            f"{s['first_ms']:.1f} ms, then at most {s['again_ms']:.1f}"
            for s in self.slow[:10]
        ]
        return "\n".join(lines)


def judge(
    *,
    model: str,
    fingerprint: str,
    written: str,
    seed: int,
    measured: Sequence[Measured],
    before: Mapping[str, float],
    after: Mapping[str, float],
    limits: ServerLimits,
    seconds: float,
    evidence: Evidence | None = None,
    stopped: str = "",
) -> Certificate:
    """The certificate of a run. ``before`` and ``after`` are the server's counters and gauges around it.

    A server that tells how much of its device is in use has one, and then a profiler's ``evidence`` is demanded.
    ``stopped`` says what was left out, and why, where the run did not get to its end.
    """
    counters = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in LATE_COUNTERS}
    counters |= {name: after[name] - before[name] for name in MEMORY_GAUGES if name in after and name in before}
    slow = [m for m in measured if m.slow]
    failures = [f"{counters[n]:g} {n.replace('_', ' ')} during the probes" for n in LATE_COUNTERS if counters[n]]
    grown = [name for name in MEMORY_GAUGES if counters.get(name, 0.0) > GROWTH_BYTES]
    failures += [f"{name.replace('_', ' ')} grew by {counters[name]:g}" for name in grown]
    if slow:
        failures.append(f"{len(slow)} first touches were slower than the same again by more than 15 % and 5 ms")
    if evidence is not None:
        failures += evidence.failures
    elif "device_used_bytes" in before:
        failures.append("no profiler evidence: none was asked for")
    if stopped:
        failures.insert(0, stopped)
    elif len(measured) < ENOUGH_PROBES:
        failures.append(f"only {len(measured)} probes; a certificate needs {ENOUGH_PROBES}")
    return Certificate(
        model=model,
        fingerprint=fingerprint,
        written=written,
        seed=seed,
        probes=len(measured),
        up_to_tokens=max((m.probe.tokens for m in measured), default=0),
        counters=counters,
        failures=tuple(failures),
        slow=tuple(_slow_json(m) for m in sorted(slow, key=lambda m: -m.excess_ms)),
        worst_excess_ms=max((m.excess_ms for m in measured), default=0.0),
        seconds=seconds,
        limits=attrs.asdict(limits),
        evidence=evidence,
        stopped=stopped,
    )


def _slow_json(measured: Measured) -> dict[str, Any]:
    return {
        **attrs.asdict(measured.probe),
        "first_ms": round(measured.first_ms, 3),
        "again_ms": round(measured.slowest_again_ms, 3),
        "late": measured.late,
    }


def to_json(certificate: Certificate) -> dict[str, Any]:
    """Plain data, with the verdict in it."""
    return {"passes": certificate.passes, **attrs.asdict(certificate)}
