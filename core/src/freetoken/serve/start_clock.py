"""How long each phase of a start took: told once, when the engine is ready."""

from __future__ import annotations

import time
from collections.abc import Callable

Report = Callable[[str, float, str], None]
"""Progress of a start: phase, fraction within it, detail."""


class StartClock:
    """Wraps a ``report`` and adds up the time between its phases."""

    def __init__(self, report: Report, now: Callable[[], float] = time.perf_counter) -> None:
        self._report = report
        self._now = now
        self._phase = ""
        self._since = now()
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, fraction: float, detail: str) -> None:
        if phase != self._phase:
            self._close()
            self._phase = phase
        self._report(phase, fraction, detail)

    def _close(self) -> None:
        now = self._now()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._since = now

    def summary(self) -> str:
        """``plugins 0.1 s, planning 0.4 s, weights 3.2 s`` in the order in which they came."""
        self._close()
        self._phase = ""
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())
