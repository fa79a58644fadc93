"""Compile workers. Oracles: Triton's own cache in this process, and a process list of what a worker imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import spaces
from attrs import evolve

from freetoken.ops.triton_stub import CompileRequest, Target, compile_request
from freetoken.warmup import compile_worker
from freetoken.warmup.compile_worker import compile_one, compile_requests, default_workers


def requests(*blocks: int) -> list[CompileRequest]:
    return [compile_request(spaces.one("by_row", 5, block)[0], Target(90)) for block in blocks]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_workers_fill_the_cache_that_this_process_reads() -> None:
    """Oracle: Triton in this process, which must then find every key on disk."""
    seen = []
    report = compile_requests(requests(16, 32, 64), workers=2, progress=seen.append)
    assert (report.compiled, report.hits, report.errors) == (3, 0, ())
    assert [r.key for r in report.results] == [r.key for r in requests(16, 32, 64)]
    assert sorted(r.key for r in seen) == sorted(r.key for r in report.results)
    assert all(r.seconds > 0 for r in report.results)
    assert all(compile_one(request).cache_hit for request in requests(16, 32, 64))
    again = compile_requests(requests(16, 32, 64, 128), workers=1)
    assert (again.compiled, again.hits) == (1, 3)


def test_without_a_driver_the_launcher_is_left_and_said_to_be() -> None:
    (result,) = compile_requests(requests(16), workers=1).results
    if result.launcher == compile_worker.LAUNCHER_LEFT:
        assert result.launcher_note
        assert "launchers of 1 left" in str(compile_requests(requests(16), workers=1))
    else:
        assert result.launcher in (compile_worker.LAUNCHER_BUILT, compile_worker.LAUNCHER_NOT_NEEDED)


def test_a_key_that_does_not_compile_fails_alone() -> None:
    good, bad = requests(16, 32)
    bad = evolve(bad, signature={**bad.signature, "x": "i32"})
    report = compile_requests([bad, good], workers=1)
    assert [bool(r.error) for r in report.results] == [True, False]
    assert report.workers_lost == 0


def test_killing_a_worker_loses_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker is killed with its first key in hand; another takes that key over."""
    original = compile_worker._Worker.compile
    killed = []

    def kill_first(self, request):
        if not killed:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return original(self, request)

    monkeypatch.setattr(compile_worker._Worker, "compile", kill_first)
    report = compile_requests(requests(16, 32, 64), workers=1)
    assert report.workers_lost == 1
    assert (report.compiled, report.errors) == (3, ())


def test_a_key_that_kills_every_worker_is_an_error_and_the_rest_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    original = compile_worker._Worker.compile
    poison = requests(32)[0].key

    def kill(self, request):
        if request.key == poison:
            os.kill(self.pid, signal.SIGKILL)
        return original(self, request)

    monkeypatch.setattr(compile_worker._Worker, "compile", kill)
    report = compile_requests(requests(16, 32, 64), workers=2)
    assert [bool(r.error) for r in report.results] == [False, True, False]
    assert "worker died" in report.errors[0].error


PROBE = """
import pickle, sys
from freetoken.warmup.compile_worker import compile_one
result = compile_one(pickle.load(open(sys.argv[1], "rb")))
assert not result.error, result.error
print(sorted(name for name in ("torch", "numpy") if name in sys.modules))
"""


def test_a_worker_imports_no_torch(tmp_path: Path) -> None:
    """Oracle: the module table of a process that did what a worker does."""
    import pickle

    path = tmp_path / "request"
    path.write_bytes(pickle.dumps(requests(16)[0]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "torch" not in done.stdout, done.stdout
    assert done.returncode == 0, done.stderr


def test_no_requests_start_no_worker() -> None:
    report = compile_requests([], workers=4)
    assert (report.results, report.compiled) == ((), 0)


@pytest.mark.parametrize(("cores", "free", "expected"), [(16, 64 * 10**9, 16), (16, 3 * 10**9, 2), (4, 0, 1)])
def test_workers_are_bounded_by_memory(cores: int, free: int, expected: int) -> None:
    assert default_workers(cores, free) == expected
