"""Fills a folder with compiled kernels for a card that need not be here; the folder may be moved afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from freetoken.vocab.warmup import CompileKeys, WarmupStep
from freetoken.warmup.compile_worker import CompileReport, compile_requests
from freetoken.warmup.keys import is_native, kernel_of, short
from freetoken.warmup.launch_space import DeclaredLaunchSpace
from freetoken.warmup.survey import survey_of
from freetoken.warmup.triton_cache import mark_relocatable, relocate


@frozen
class CompiledFolder:
    """What became of a folder. ``moved`` group files were made valid again first, since the folder lay elsewhere."""

    folder: Path
    report: CompileReport
    moved: int
    native: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.report} in {self.report.seconds:.1f} s, in {self.folder}"]
        if self.moved:
            lines.append(f"the folder had been moved: {self.moved} kernels were found again at their new place")
        if self.native:
            lines.append(f"left to a machine with the card: native modules {', '.join(self.native)}")
        lines += [f"failed: {short(r.key)} of {kernel_of(r.key)}: {r.error}" for r in self.report.errors]
        return "\n".join(lines)

    def to_json(self) -> Mapping[str, Any]:
        return {
            "folder": str(self.folder),
            "compiled": self.report.compiled,
            "in_cache": self.report.hits,
            "failed": {r.key: r.error for r in self.report.errors},
            "launchers_left": self.report.launchers_left,
            "native_left": list(self.native),
            "moved": self.moved,
            "seconds": round(self.report.seconds, 3),
        }


def compile_into(folder: Path, space: DeclaredLaunchSpace, steps: Iterable[WarmupStep]) -> CompiledFolder:
    """Compile every key that ``steps`` compile into ``folder``, as Triton's disk cache; touches no device.

    Raises ``OSError`` where the folder cannot be written. Kernels that fail are in the report.
    """
    compiling = [step for step in steps if isinstance(step, CompileKeys)]
    keys = tuple(dict.fromkeys(key for step in compiling for key in step.keys))
    folder.mkdir(parents=True, exist_ok=True)
    moved = relocate(folder)
    requests = survey_of(space).requests(space.device, keys)
    with _triton_cache(folder):
        report = compile_requests(requests, max((step.workers for step in compiling), default=1))
    mark_relocatable(folder)
    return CompiledFolder(folder, report, moved, tuple(kernel_of(key) for key in keys if is_native(key)))


@contextmanager
def _triton_cache(folder: Path) -> Iterator[None]:
    """Workers inherit the variable; this process itself compiles nothing."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before
