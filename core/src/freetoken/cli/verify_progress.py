"""Tells how ``freetoken warmup verify`` gets on: a line that changes on a terminal, one every few seconds elsewhere."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import TextIO

EVERY_S = 3.0
_LOGGED = re.compile(r"^\d{4}-\d\d-\d\d .*? (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


class ProbeProgress:
    """Called before each probe; ``say`` tells of anything else at once. ``last`` is what was told last."""

    def __init__(self, out: TextIO, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.last = ""
        self._out = out
        self._total = total
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._next = 0.0

    def __call__(self, done: int, share: float, words: str) -> None:
        """``done`` probes, which are ``share`` of the work; ``words`` say what comes next."""
        now = self._clock()
        if share == 0.0 or self._first is None:
            self._first = now  # of the timed probes: what came before says nothing of their pace
        left = f", about {(now - self._first) / share * (1 - share):.0f} s left" if share > 0 else ""
        self.last = f"probe {done} of {self._total}, {now - self._began:.0f} s{left}: {words}"
        if self._out.isatty():
            print(f"\r\x1b[K{self.last}", end="", file=self._out, flush=True)
        elif now >= self._next:
            self._next = now + EVERY_S
            print(f"verify: {self.last}", file=self._out, flush=True)

    def say(self, words: str) -> None:
        """Something that happens once."""
        self.close()
        self.last = f"{words} ({self._clock() - self._began:.1f} s)"
        print(f"verify: {self.last}", file=self._out, flush=True)

    def close(self) -> None:
        """Leave a terminal's line empty."""
        if self._out.isatty():
            print("\r\x1b[K", end="", file=self._out, flush=True)


class LogTail:
    """What was written to a file since the last look: the start's phases, warnings and errors, line by line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._offset = 0

    def news(self) -> list[str]:
        """Whole lines only. The file's own position, at which another process may write, is left alone."""
        data = os.pread(self._descriptor, 1 << 20, self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line for line in whole.decode(errors="replace").splitlines() if worth_telling(line)]


def worth_telling(line: str) -> bool:
    """Lines of the log below a warning are details, and so is what is indented; phases bear no level."""
    level = _LOGGED.match(line)
    return bool(line) and not line[0].isspace() and (level is None or level[1] not in ("DEBUG", "INFO"))
