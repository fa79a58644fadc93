"""What the HTTP process takes on: the server's limits, and the pure decision whether one more request fits."""

from __future__ import annotations

import math

from attrs import frozen

from freetoken.vocab.units import MIB


@frozen
class ServerLimits:
    """``max_body_bytes``: larger bodies get 413. ``max_queue``: requests that may wait beyond those the engine runs at
    once; one more gets 429. ``max_choices``: ``n`` times the prompts of one request. ``drain_s``: how long a shutdown
    waits for running requests. ``request_timeout_s``: no request runs longer, from its arrival."""

    max_body_bytes: int = 32 * MIB
    max_queue: int = 256
    max_choices: int = 128
    drain_s: float = 30.0
    request_timeout_s: float | None = None


@frozen
class Load:
    """Sequences at the engine now, and how long the recent ones took."""

    in_flight: int
    recent_s: float = 0.0


@frozen
class Admission:
    """Whether a request is taken; if not, when to come back and why."""

    taken: bool
    retry_after_s: int = 0
    reason: str = ""


def admit(limits: ServerLimits, load: Load, sequences: int, max_running: int) -> Admission:
    """``sequences`` more on top of ``load``, for an engine that runs ``max_running`` at once."""
    room = max_running + limits.max_queue
    if load.in_flight + sequences <= room:
        return Admission(True)
    ahead = load.in_flight + sequences - room
    wait_s = max(1, min(60, math.ceil(load.recent_s * ahead / max_running)))
    found = f"{load.in_flight} sequences are running or waiting, and {room} are taken ({max_running} running + queue)"
    return Admission(False, wait_s, found)
