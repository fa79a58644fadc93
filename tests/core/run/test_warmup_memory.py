"""What a start remembers. Oracle: two starts in a row on one folder, and files damaged by hand."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from attrs import evolve

from freetoken.models import llama
from freetoken.run.warmup import WarmupOutcome, WarmupRun
from freetoken.run.warmup_device import WarmupDevice
from freetoken.run.warmup_memory import WarmupMemory
from freetoken.testing.plans import planned
from freetoken.testing.warmup import example_space
from freetoken.vocab.launch import LaunchSpace, StepPoint
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Capture, CompileKeys, Forward, Known, LoadKeys, WarmupStep
from freetoken.warmup.cover import cover
from freetoken.warmup.launch_space import DeclaredLaunchSpace
from freetoken.warmup.manifest import ManifestStore
from freetoken.warmup.survey import survey_of

PLAN = planned(llama.tiny(), dtype="float32").plan
PLAN = evolve(PLAN, hardware=evolve(PLAN.hardware, cores=1))  # walk the space in this process


class Covering:
    """A policy that covers everything, and keeps what it was told is known."""

    def __init__(self) -> None:
        self.known: Known | None = None

    def steps(self, plan: Plan, launch_space: LaunchSpace, known: Known) -> Iterable[WarmupStep]:
        self.known = known
        return cover(launch_space, known, launch_space.space.tokens.high, 1)


class Scratch:
    def __init__(self, fail: Callable[[StepPoint], None] = lambda _: None) -> None:
        self.fail = fail

    def run(self, point: StepPoint) -> None:
        self.fail(point)


def start(
    folder: Path, plan: Plan = PLAN, space: DeclaredLaunchSpace | None = None, scratch: Scratch | None = None
) -> tuple[Known, WarmupOutcome, WarmupMemory]:
    memory = WarmupMemory(folder, {"kernels": ("1.0", "json")})
    space = space or example_space()
    policy, device = Covering(), WarmupDevice(space)
    run = WarmupRun("covering", policy, plan, space, lambda: memory.recall(plan, space), device)
    run.start_compile()
    run.load()
    outcome = run.finish(scratch or Scratch())
    memory.write(plan, space, outcome, device)
    assert policy.known is not None
    return policy.known, outcome, memory


def kinds(outcome: WarmupOutcome) -> list[str]:
    return [type(item.step).__name__ for item in outcome.steps]


def test_a_second_start_loads_sweeps_and_runs_one_forward(tmp_path: Path) -> None:
    first, cold, _ = start(tmp_path)
    assert (first.proven, first.because) == (False, "no manifest yet")
    assert "CompileKeys" in kinds(cold)
    second, warm, _ = start(tmp_path)
    assert second.proven
    assert second.compiled == survey_of(example_space()).keys
    assert sorted(kinds(warm)) == ["Capture", "Forward", "LoadKeys", "Touch", "Touch"]


def test_the_second_start_walks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The survey comes out of the manifest, whatever the launch functions would say now."""
    start(tmp_path)
    monkeypatch.setattr("freetoken.run.warmup_memory.survey", lambda _: pytest.fail("walked again"))
    space = example_space()
    start(tmp_path, space=space)
    assert survey_of(space).keys == survey_of(example_space()).keys


def test_another_configuration_says_what_changed(tmp_path: Path) -> None:
    start(tmp_path)
    known, _, _ = start(tmp_path, evolve(PLAN, dtype="bfloat16"))
    assert not known.compiled
    assert "configuration: " in known.because
    assert len(ManifestStore(tmp_path).paths()) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(json.dumps({"format": 99})),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "late": [{"point": {}}]})),
    ],
)
def test_a_damaged_manifest_is_ignored_with_a_reason(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path)
    (path,) = ManifestStore(tmp_path).paths()
    damage(path)
    with caplog.at_level(logging.INFO, "freetoken.warmup"):
        known, outcome, _ = start(tmp_path)
    assert not known.proven
    assert "is damaged" in known.because
    assert path.name in caplog.text
    assert "CompileKeys" in kinds(outcome)
    assert start(tmp_path)[0].proven, "the start that ignored it has written a good one"


def test_a_foreign_manifest_is_ignored_with_a_reason(tmp_path: Path) -> None:
    """A file copied from another machine under the right name: its facts are what counts."""
    start(tmp_path)
    (path,) = ManifestStore(tmp_path).paths()
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "fingerprint": {**data["fingerprint"], "driver": "1.2.3"}}))
    known, _, _ = start(tmp_path)
    assert not known.proven
    assert "driver: absent, was 1.2.3" in known.because


def test_late_points_are_covered_by_the_next_start(tmp_path: Path) -> None:
    _, _, memory = start(tmp_path)
    point = StepPoint(3, 1, 3, 777, 1, decode=False)
    memory.late(point, ("load of a_kernel",))
    memory.late(point, ("load of another",))
    known, outcome, _ = start(tmp_path)
    assert known.late == (point,)
    assert point in [item.step.point for item in outcome.steps if isinstance(item.step, Forward)]
    assert start(tmp_path)[0].late == (point,), "a new process has to do it again"


def test_a_start_that_skipped_steps_has_proved_nothing(tmp_path: Path) -> None:
    def no_room(point: StepPoint) -> None:
        if point.tokens >= 100:
            raise MemoryError

    start(tmp_path, scratch=Scratch(no_room))
    known, _, _ = start(tmp_path)
    assert known.compiled
    assert not known.proven


def test_keys_that_left_tritons_cache_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    start(tmp_path)
    (path,) = ManifestStore(tmp_path).paths()
    data = json.loads(path.read_text())
    gone = sorted(data["compiled"])[0]
    data["compiled"][gone] = "00" * 32
    path.write_text(json.dumps(data))
    known, outcome, _ = start(tmp_path)
    assert gone not in known.compiled
    assert "1 more are gone from Triton's cache" in known.because
    assert [s.step.keys for s in outcome.steps if isinstance(s.step, CompileKeys)] == [(gone,)]


def test_a_folder_that_cannot_be_written_costs_the_start_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    _, outcome, memory = start(blocked)
    assert outcome.done
    assert "no manifest was left" in caplog.text
    memory.late(StepPoint(1, 1, 1, 1, 1, decode=False), ("load of x",))
    assert "was not written down" in caplog.text


def test_two_servers_that_start_at_once_leave_one_whole_manifest(tmp_path: Path) -> None:
    """Both read nothing, both write; a reader in between finds one of the two, never a part."""
    one, other = WarmupMemory(tmp_path), WarmupMemory(tmp_path)
    spaces = example_space(), example_space()
    runs = []
    for memory, space in zip((one, other), spaces, strict=True):
        device = WarmupDevice(space)
        run = WarmupRun("covering", Covering(), PLAN, space, lambda m=memory, s=space: m.recall(PLAN, s), device)  # type: ignore[misc]
        run.start_compile()
        run.load()
        runs.append((memory, space, run, device))
    for memory, space, run, device in runs:
        memory.write(PLAN, space, run.finish(Scratch()), device)
    (path,) = ManifestStore(tmp_path).paths()
    assert ManifestStore(tmp_path).find(PLAN.served_name, one.fingerprint).manifest is not None  # type: ignore[arg-type]
    assert not [p for p in os.listdir(path.parent) if p.startswith(".")], "no temporary file is left"


def test_capture_and_loads_come_under_every_start(tmp_path: Path) -> None:
    for _ in range(2):
        _, outcome, _ = start(tmp_path)
        assert [s.step for s in outcome.steps if isinstance(s.step, Capture)]
        assert [s.step for s in outcome.steps if isinstance(s.step, LoadKeys)]
