"""The watch: after the warmup, every compile, module load, tuning run and native build is counted by name.

It listens where Triton tells (its compilation listener and load hooks, which are chained), and to the process's audit
events for compilers that libraries start. Triton's cache hook is left alone: a veto there drops launches silently.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any

from attrs import field, frozen

from freetoken.vocab.errors import EngineError

_log = logging.getLogger("freetoken.warmup")

COMPILE = "compile"
LOAD = "load"
TUNE = "tune"
BUILD = "build"

COUNT, WARN, ERROR = "count", "warn", "error"

COMPILERS = frozenset({"nvcc", "ninja", "gcc", "g++", "cc", "c++", "clang", "clang++", "hipcc"})
"""Programs that only a native build starts. Triton's own ptxas is not one: its compiles are told by the listener."""

MAX_EVENTS = 1000


@frozen
class LateEvent:
    """One thing that the warmup should have done: what it was, and of which kernel or program."""

    what: str
    name: str
    ms: float = field(default=0.0, eq=False)

    def __str__(self) -> str:
        return f"{self.what} of {self.name}" + (f" ({self.ms:.0f} ms)" if self.ms else "")


class LateWatch:
    """Counts events while armed. ``mode`` is ``count``, ``warn`` (each is logged too) or ``error``.

    In the mode ``error`` the event is raised as ``EngineError`` once the kernel is loaded and before it is launched, so
    that the step fails, its requests with it, and the next one finds everything in place.
    """

    def __init__(self, mode: str = COUNT) -> None:
        self.mode = mode
        self.counts: Counter[str] = Counter()
        self.events: list[LateEvent] = []
        self._armed = False
        self._restore: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._raise_at_load: LateEvent | None = None

    @property
    def armed(self) -> bool:
        return self._armed

    @property
    def total(self) -> int:
        """All events so far; compare before and after a step to know whether it met any."""
        return sum(self.counts.values())

    @property
    def compiles(self) -> int:
        """Compiles, tuning runs and native builds: what takes from tenths of a second to minutes."""
        return self.counts[COMPILE] + self.counts[TUNE] + self.counts[BUILD]

    @property
    def loads(self) -> int:
        return self.counts[LOAD]

    def since(self, total: int) -> tuple[LateEvent, ...]:
        """The events after ``total`` of them had been seen, as far as they are kept."""
        new = self.total - total
        return tuple(self.events[-new:]) if new else ()

    def arm(self, with_triton: bool = False) -> None:
        """Start counting. ``with_triton`` imports triton where it is installed, since the first launch might; where it
        is not there, only native builds can happen."""
        if self._armed:
            return
        self._armed = True
        _audit(self)
        self._restore.append(lambda: _AUDITED.discard(self))
        if "triton" in sys.modules or (with_triton and find_spec("triton") is not None):
            self._arm_triton()

    def disarm(self) -> None:
        """Stop counting and put every hook back."""
        self._armed = False
        while self._restore:
            self._restore.pop()()

    def note(self, event: LateEvent) -> None:
        """Count one event. Called from whatever thread met it."""
        with self._lock:
            self.counts[event.what] += 1
            self.events.append(event)
            del self.events[:-MAX_EVENTS]
        if self.mode != COUNT:
            _log.warning("after the warmup: %s", event)

    # ------------------------------------------------------------------------------------------------ triton's hooks

    def _arm_triton(self) -> None:
        from triton import knobs

        before = knobs.compilation.listener

        def listen(**told: Any) -> None:
            if before is not None:
                before(**told)
            self._compiled(**told)

        knobs.compilation.listener = listen
        self._restore.append(lambda: _restore_slot(knobs.compilation, "listener", listen, before))
        knobs.runtime.kernel_load_start_hook.add(self._loading)
        self._restore.append(lambda: knobs.runtime.kernel_load_start_hook.remove(self._loading))
        knobs.runtime.kernel_load_end_hook.add(self._loaded)
        self._restore.append(lambda: knobs.runtime.kernel_load_end_hook.remove(self._loaded))
        self._watch_tuning(knobs)

    def _compiled(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            total = getattr(times, "total", 0)
            self.note(LateEvent(COMPILE, _name(src), float(total) / 1000 if isinstance(total, int | float) else 0.0))

    def _loading(self, module: Any, function: Any, name: str, group: Any, hash: Any) -> None:
        self.note(LateEvent(LOAD, name))

    def _loaded(self, module: Any, function: Any, name: str, group: Any, hash: Any) -> None:
        if self.mode == ERROR:
            raise late_error((LateEvent(LOAD, name),))

    def _watch_tuning(self, knobs: Any) -> None:
        """Triton tells of tuning runs since 3.8; before, a tuning table that grew during a launch shows one."""
        slot = getattr(knobs, "autotuning", None)
        if slot is not None and hasattr(slot, "listener"):
            before = slot.listener

            def listen(**told: Any) -> None:
                if before is not None:
                    before(**told)
                if not told.get("cache_hit"):
                    self.note(LateEvent(TUNE, _name(told.get("fn")), 1000 * float(told.get("duration") or 0.0)))

            slot.listener = listen
            self._restore.append(lambda: _restore_slot(slot, "listener", listen, before))
            return
        from triton.runtime.autotuner import Autotuner

        original = Autotuner.run
        watch = self

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            known = len(tuner.cache)
            result = original(tuner, *args, **kwargs)
            if len(tuner.cache) > known:
                watch.note(LateEvent(TUNE, _name(tuner.base_fn if hasattr(tuner, "base_fn") else tuner)))
            return result

        Autotuner.run = run
        self._restore.append(lambda: _restore_slot(Autotuner, "run", run, original))


def _restore_slot(owner: Any, name: str, ours: Any, before: Any) -> None:
    """Put back what was there, unless somebody chained themselves in after us: then our part is already inert."""
    if getattr(owner, name) is ours:
        setattr(owner, name, before)


def _name(source: Any) -> str:
    fn = getattr(source, "fn", source)
    return str(getattr(fn, "__name__", None) or getattr(source, "name", None) or fn)


def late_error(events: tuple[LateEvent, ...]) -> EngineError:
    """What a step fails with under ``--on-late-compile error``."""
    return EngineError(
        "a step after the warmup", f"it met {', '.join(map(str, events))}, and --on-late-compile is error",
        "try again; `freetoken warmup report` lists what was met, and the next start covers it",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- native builds

_AUDITED: set[LateWatch] = set()
_HOOKED: list[bool] = []
"""An audit hook cannot be taken off, so one is put on for good and looks at which watches are armed."""


def _audit(watch: LateWatch) -> None:
    _AUDITED.add(watch)
    if not _HOOKED:
        _HOOKED.append(True)
        sys.addaudithook(_on_audit)


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _AUDITED or event not in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        return
    program = PurePath(str(arguments[0])).name
    if program in COMPILERS or program.rpartition("-")[2] in COMPILERS:
        for watch in tuple(_AUDITED):
            watch.note(LateEvent(BUILD, program))


@contextmanager
def watching(mode: str = COUNT) -> Iterator[LateWatch]:
    """A watch that is armed inside the block."""
    watch = LateWatch(mode)
    watch.arm()
    try:
        yield watch
    finally:
        watch.disarm()
