"""Surveying a launch space in child processes, one op each, while the parent loads weights. They import no torch."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from attrs import evolve, frozen

from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launches, StepPoint, StepSpace, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken.warmup.enumerate import KeyUse
from freetoken.warmup.launch_space import DeclaredLaunchSpace, OpLaunches, build_launch_space
from freetoken.warmup.survey import LibraryUse, Survey, survey, wider

_PART = "op"
_log = logging.getLogger("freetoken.warmup")


@frozen
class _Job:
    """One op to survey. Picklable where the launch function is one of a module, as those of kernels are."""

    space: StepSpace
    shape: OpShape
    function: Launches
    device: Device

    def run(self) -> Survey:
        return survey(build_launch_space(self.space, [(_PART, ((self.shape, self.function),))], self.device))


def survey_in_children(launch_space: DeclaredLaunchSpace, workers: int) -> Survey:
    """The same survey as ``survey`` makes, each op walked by a process of its own, ``workers`` at a time.

    An op whose launch function cannot be sent to another process is walked in this one.
    """
    ops = list(dict.fromkeys(op for kind in launch_space.kinds for op in launch_space.ops(kind)))
    with ThreadPoolExecutor(max(1, workers)) as pool:
        surveys = dict(zip(ops, pool.map(_survey_op, (_job(op, launch_space) for op in ops)), strict=True))
    return merged(launch_space, surveys)


def _job(op: OpLaunches, launch_space: DeclaredLaunchSpace) -> _Job:
    return _Job(launch_space.space, op.shape, op.function, launch_space.device)


def _survey_op(job: _Job) -> Survey:
    try:
        sent = pickle.dumps(tuple(sys.path)) + pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError):  # a closure: only this process has it
        return job.run()
    command = [sys.executable, "-c", "from freetoken.warmup.survey_worker import main; main()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, input=sent, capture_output=True, env=environment, check=False)
    if done.returncode:
        # What is wrong with the function shows here just as well; what the child could not import, this process has.
        words = done.stderr.decode(errors="replace").strip().splitlines()
        _log.info("warmup: %s is walked in this process: %s", job.shape.op, words[-1] if words else done.returncode)
        return job.run()
    found: Survey = pickle.loads(done.stdout)
    return found


def main() -> None:
    """The child: one job on standard input, its survey on standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:] = pickle.load(sys.stdin.buffer)  # before the job: its launch function is found by importing
    job: _Job = pickle.load(sys.stdin.buffer)
    answers.write(pickle.dumps(portable(job.run())))
    answers.close()


def portable(found: Survey) -> Survey:
    """Without what cannot leave the process: native modules keep their key alone."""
    uses = {
        key: use if isinstance(use.launch, TritonLaunch) else evolve(use, launch=None)
        for key, use in found.uses.items()
    }
    return evolve(found, uses=uses)


def merged(launch_space: DeclaredLaunchSpace, surveys: Mapping[OpLaunches, Survey]) -> Survey:
    """One survey of the whole from one of each op: kinds are the whole space's, witnesses are joined."""
    uses: dict[str, KeyUse] = {}
    libraries: dict[str, LibraryUse] = {}
    for kind in launch_space.kinds:
        for op in launch_space.ops(kind):
            for key, use in surveys[op].uses.items():
                uses[key] = _joined(uses.get(key), use, kind)
            for library in surveys[op].libraries:
                named = evolve(library, kind=kind)
                known = libraries.get(named.name)
                libraries[named.name] = named if known is None else wider(known, named)
    points = sum(found.points for found in surveys.values())
    return Survey(uses, tuple(libraries[name] for name in sorted(libraries)), points)


def _joined(known: KeyUse | None, use: KeyUse, kind: str) -> KeyUse:
    if known is None:
        return evolve(use, kinds=(kind,))
    points = (*known.witnesses, *use.witnesses)
    fewest, most = _first_by(points, lambda p: p.tokens), _first_by(points, lambda p: -p.tokens)
    longest = _first_by(points, lambda p: -p.max_context)
    witnesses = sorted(dict.fromkeys((fewest, longest, most)), key=lambda p: p.tokens)
    return evolve(known, kinds=tuple(dict.fromkeys((*known.kinds, kind))), witnesses=tuple(witnesses))


def _first_by(points: Iterable[StepPoint], measure: Callable[[StepPoint], int]) -> StepPoint:
    return min(points, key=measure)
