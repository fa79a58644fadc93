"""Does a policy's key steps: compiles in worker processes, loads modules on this device, sweeps libraries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from freetoken.ops.triton_stub import Target, compile_request
from freetoken.vocab.errors import EngineError
from freetoken.vocab.launch import NativeModule, TritonLaunch
from freetoken.vocab.warmup import CompileKeys, LoadKeys
from freetoken.warmup.compile_worker import CompileReport, CompileResult, compile_requests
from freetoken.warmup.keys import kernel_of, short
from freetoken.warmup.launch_space import DeclaredLaunchSpace
from freetoken.warmup.load import load_launch
from freetoken.warmup.survey import Survey, library_call, native_module, survey_of

_log = logging.getLogger("freetoken.warmup")


class WarmupDevice:
    """Implements ``run.warmup.KeyDevice`` for one launch space.

    ``held`` are the kernels loaded, which must live on; ``hashes`` are what Triton's disk cache files each key under.
    """

    def __init__(self, space: DeclaredLaunchSpace) -> None:
        self._space = space
        self.held: list[Any] = []
        self.hashes: dict[str, str] = {}
        self.reports: list[CompileReport] = []

    @property
    def _survey(self) -> Survey:
        return survey_of(self._space)

    def compile(self, step: CompileKeys, progress: Callable[[int], None]) -> str:
        """Triton's keys in worker processes, native modules beside them; raises ``EngineError`` naming what failed."""
        launches = [self._launch(key) for key in step.keys]
        triton = [launch for launch in launches if isinstance(launch, TritonLaunch)]
        modules = [launch for launch in launches if isinstance(launch, NativeModule)]
        done = count()

        def one(_: CompileResult | None = None) -> None:
            progress(next(done) + 1)

        # One module after the other: each build starts as many compilers as the machine holds.
        with ThreadPoolExecutor(1, thread_name_prefix="native-build") as builder:
            built = builder.submit(_build_all, modules, one)
            if triton:
                target = Target.of(self._space.device)
                report = compile_requests([compile_request(launch, target) for launch in triton], step.workers, one)
                self.reports.append(report)
        built.result()
        if triton:
            _refuse_failures(self.reports[-1])
        said = [str(self.reports[-1])] if triton else []
        return ", ".join([*said, *([f"{len(modules)} native modules built"] if modules else [])])

    def load(self, step: LoadKeys, progress: Callable[[int], None]) -> str:
        """One thread loads them all: Triton's loading is not safe beside a launch of the same kernel."""
        for done, key in enumerate(step.keys):
            launch = self._launch(key)
            if isinstance(launch, TritonLaunch):
                kernel = load_launch(launch)
                self.held.append(kernel)
                self.hashes[key] = str(kernel.hash)
            else:
                launch.load()
            progress(done + 1)
        return ""

    def sweep(self, name: str, rows: int) -> None:
        for library in self._survey.libraries:
            if library.name == name:
                library_call(self._space, library).sweep(rows)
                return
        for key, use in self._survey.uses.items():
            if kernel_of(key) == name and not isinstance(use.launch, TritonLaunch):
                module = native_module(self._space, use)
                module.build()
                module.load()
                return
        raise EngineError(f"touch {name}", "the launch space has no library and no native module of this name")

    def kernel_seconds(self) -> dict[str, float]:
        """Seconds of compiling by kernel, over all workers."""
        found: dict[str, float] = {}
        for report in self.reports:
            for result in report.results:
                kernel = kernel_of(result.key)
                found[kernel] = found.get(kernel, 0.0) + result.seconds
        return found

    def _launch(self, key: str) -> TritonLaunch | NativeModule:
        use = self._survey.uses.get(key)
        if use is None:
            raise EngineError(f"the key {short(key)}", "no kernel of this plan can launch it")
        return use.launch if isinstance(use.launch, TritonLaunch) else native_module(self._space, use)


def _build_all(modules: Sequence[NativeModule], built: Callable[[], None]) -> None:
    for module in modules:
        module.build()
        built()


def _refuse_failures(report: CompileReport) -> None:
    if report.workers_lost:
        _log.warning("warmup: %d compile workers died; others took over their keys", report.workers_lost)
    if report.errors:
        first = report.errors[0]
        others = f" (and {len(report.errors) - 1} more keys)" if len(report.errors) > 1 else ""
        raise EngineError(f"compiling {short(first.key)} of {kernel_of(first.key)}", f"{first.error}{others}")
