"""The script for whole models on a GPU, tried at tiny sizes on a CPU, so that it runs right the first time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_model
import gpu_profile
import pytest
import torch
from attrs import define, field
from checkpoint_kinds import KINDS
from gpu_session import EAGER, Session, open_session
from make_checkpoint import make_checkpoint

from freetoken.ops.paged_attention import TorchAttention
from freetoken.run import graphs as graphs_module
from freetoken.run.graphs import DecodeGraphs
from freetoken.run.step_plan import StepPlan

OPTIONS = {
    "device": "cpu", "dtype": "float32", "prefix_cache": False, "max_seq_len": 512, "max_running_requests": 10,
    "max_prefill_tokens": 256, "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module", params=["tiny-qwen3-moe", "tiny-qwen3.6-moe"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    list(make_checkpoint(KINDS[request.param], found, seed=1))
    return found


class Results(list[dict[str, Any]]):
    def emit(self, kind: str, **fields: Any) -> None:
        self.append({"kind": kind, **fields})


@define(eq=False)
class _Late:
    """A plan that is made anew for every replay, as a captured one's buffers are written anew."""

    inner: Any = None


class _Graph:
    """What stands for a CUDA graph on a CPU: its replay runs what was captured."""

    def __init__(self) -> None:
        self.replay: Any = None


@define(eq=False)
class Stub:
    """Replaces what needs a GPU; ``error`` is added to every replayed row of logits, as a broken graph would."""

    error: float = 0.0
    forgets_state: bool = False
    seen: list[int] = field(factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch, session: Session) -> DecodeGraphs:
        stream = type("Stream", (), {"wait_stream": lambda self, other: None})
        for name, stand_in in {
            "Stream": stream, "CUDAGraph": _Graph, "current_stream": stream, "synchronize": lambda: None,
            "stream": lambda _: nullcontext(), "graph": lambda *_, **__: nullcontext(),
            "graph_pool_handle": lambda: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(graphs_module.torch.cuda, name, stand_in)
        plan, forward = TorchAttention.plan, TorchAttention.forward
        monkeypatch.setattr(TorchAttention, "reserve_graph", lambda self, limits: None)
        monkeypatch.setattr(TorchAttention, "plan_capture", lambda self, batch: _Late(plan(self, batch)))
        monkeypatch.setattr(
            TorchAttention, "plan_replay", lambda self, late, batch: setattr(late, "inner", plan(self, batch))
        )
        monkeypatch.setattr(
            TorchAttention, "forward",
            lambda self, q, k, v, layer, p: forward(self, q, k, v, layer, p.inner if isinstance(p, _Late) else p),
        )  # fmt: skip
        engine = session.engine
        built = session.llm.running.built
        from freetoken.run.create import attention_limits

        engine.capture_graphs(engine._sampler._call, attention_limits(built.plan), lambda *_: None)
        graphs = engine._graphs
        assert graphs is not None
        for size, captured in graphs._captured.items():
            captured.graph.replay = lambda size=size, captured=captured: self._replay(session, graphs, size, captured)
        return graphs

    def _replay(self, session: Session, graphs: DecodeGraphs, size: int, captured: Any) -> None:
        from freetoken.plugin.protocols import Step

        self.seen.append(size)
        runner = session.engine.runner
        batch = captured.inputs.batch(captured.tokens, (1,) * size)
        step = Step(batch, captured.plans, runner.pools.layers)
        captured.next_tokens.copy_(graphs._body(captured.inputs, step, captured.tokens))
        session.logits[size] = session.logits[EAGER] + self.error


@pytest.fixture
def session(directory: Path) -> Iterator[Session]:
    with open_session(directory, **OPTIONS) as opened:
        yield opened


def test_replays_that_equal_eager_steps_pass(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real capture and replay code; exact and padded sizes; recurrent states are put back between the two ways."""
    stub, results = Stub(), Results()
    stub.install(monkeypatch, session)
    gpu_checks.check_graphs(session, results.emit, steps=3)
    (found,) = results
    assert found["ok"], found
    assert found["sizes"] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert found["padded"] == [9]
    assert found["compared"] == 30
    assert set(stub.seen) == set(found["sizes"])


def test_a_replay_that_differs_by_one_bit_fails(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results()
    Stub(error=2.0**-20).install(monkeypatch, session)
    gpu_checks.check_graphs(session, results.emit, steps=2)
    assert not results[0]["ok"]
    assert results[0]["num_differing"] == results[0]["compared"]


def test_a_step_that_is_not_taken_back_is_noticed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation of the check itself: without putting states back, a recurrent model's replay starts elsewhere."""
    results = Results()
    Stub().install(monkeypatch, session)
    monkeypatch.setattr(gpu_checks, "_taken_back", lambda *_: nullcontext())
    gpu_checks.check_graphs(session, results.emit, steps=2)
    assert results[0]["ok"] == (not session.llm.plan.model.state_slot_bytes)


def test_without_graphs_the_check_fails(session: Session) -> None:
    results = Results()
    gpu_checks.check_graphs(session, results.emit)
    assert not results[0]["ok"]


def test_the_mix_of_requests_is_served(session: Session) -> None:
    results = Results()
    gpu_checks.check_cache(session, results.emit)
    (found,) = results
    assert found["ok"]
    assert found["undeclared"] == []
    assert session.llm.running.core.steps > 100


def test_a_key_that_was_not_declared_fails(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_checks, "device_cache_keys", lambda: frozenset({"freetoken_x:kernel|odd", "other:kernel|y"})
    )
    monkeypatch.setattr(gpu_checks, "PROMPTS", (3,))
    results = Results()
    gpu_checks.check_cache(session, results.emit)
    assert not results[0]["ok"]
    assert len(results[0]["undeclared"]) == 1
    assert results[0]["foreign"] == ["other:kernel"]


def test_our_logits_equal_transformers_in_float32(session: Session, directory: Path) -> None:
    """Oracle: transformers. Prefill in one and in several chunks, decode alone and in a batch."""
    cases = gpu_checks.our_cases(session, (1, 17, 300), decodes=4)
    assert {case.name for case in cases} == {
        "prefill 1", "decode after 1", "prefill 17", "decode after 17", "prefill 300", "decode after 300",
        "decode, 8 at once",
    }  # fmt: skip
    model = gpu_checks.load_transformers(directory, torch.float32, "cpu")
    for case in cases:
        exact = gpu_checks.their_logits(model, case, "cpu")
        assert case.ours.shape == exact.shape
        assert float((case.ours - exact).abs().max()) < 2e-3, case.name


def test_logits_are_judged_over_many_texts() -> None:
    """By hand: errors of 1 and 2 against 2 and 2."""
    exact = torch.zeros(2, 4)
    ours, theirs = exact + torch.tensor([[1.0], [2.0]]), exact + 2.0
    found = gpu_checks.compare([(ours[:1], theirs[:1], exact[:1]), (ours[1:], theirs[1:], exact[1:])])
    assert found["max_ratio"] == 1.0
    assert found["rms_ratio"] == pytest.approx((2.5**0.5) / 2)
    assert found["rows"] == 2
    broken = gpu_checks.compare([(ours * float("nan"), theirs, exact)])
    assert not broken["max_ratio"] <= gpu_checks.ALLOWED_RATIO


def test_a_profile_is_summed_up_by_kernel() -> None:
    """By hand: two steps of two kernels, 10 µs of gap inside each step and a millisecond between them."""
    event = {"cat": "kernel", "name": "void a::b(int)", "ts": 0.0, "dur": 5.0}
    events = [
        event, {**event, "name": "c", "ts": 15.0, "dur": 1.0}, {**event, "ts": 1000.0},
        {**event, "name": "c", "ts": 1015.0, "dur": 3.0}, {**event, "cat": "cpu_op", "ts": 3.0},
    ]  # fmt: skip
    found = gpu_profile.summarise(gpu_profile.read_trace({"traceEvents": events}), 2)
    assert found["kernels"] == 2
    assert found["busy_us"] == 7.0
    assert found["gap_us"] == 10.0
    assert found["between_steps_us"] == 492.0
    assert found["rows"] == [["a::b(int)", 1.0, 5.0, 5.0, 0.7143], ["c", 1.0, 2.0, 2.0, 0.2857]]
    assert gpu_profile.summarise([], 2)["kernels"] == 0


def test_the_host_is_timed_by_stage(session: Session) -> None:
    results = Results()
    gpu_profile.profile_host(session, results.emit, tokens=5)
    table = results[0]["ms_a_step"]
    assert table["core.step"][0] > table["engine.launch"][0] > 0
    assert table["engine.launch"][1] == 5
    assert "5 steps" in gpu_model.show("p", results[0])[0]


def test_a_decode_step_can_be_launched_again_and_again(session: Session) -> None:
    plan = gpu_profile.decode_step(session, 2, 20)
    assert isinstance(plan, StepPlan)
    first = [len(session.engine.launch(plan).read().tokens) for _ in range(3)]
    assert first == [2, 2, 2]


def _child(tmp_path: Path, report: gpu_model.Report, script: str, monkeypatch: pytest.MonkeyPatch) -> gpu_model.Child:
    file = tmp_path / "part.py"
    file.write_text(script)
    monkeypatch.setattr(gpu_model, "__file__", str(file))
    return gpu_model.Child("part", [], tmp_path, report.take)


def test_a_part_that_crashes_is_reported_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = gpu_model.Report()
    child = _child(tmp_path, report, 'print(\'@@{"kind": "x", "ok": true}\')\nraise SystemExit(\'oh no\')', monkeypatch)
    why = child.finish(time.monotonic() + 20)
    assert "ended with 1" in why
    assert "oh no" in why
    assert report.results == [{"part": "part", "kind": "x", "ok": True}]


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = _child(tmp_path, gpu_model.Report(), "import time\ntime.sleep(600)", monkeypatch)
    assert child.finish(time.monotonic() + 1).startswith("ran out of time")
    assert child._process.returncode == -signal.SIGTERM


def test_every_result_prints_in_few_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of everything stays under ten thousand characters."""
    report = gpu_model.Report()
    logits = gpu_checks.compare([(torch.ones(3, 4), torch.ones(3, 4) * 2, torch.zeros(3, 4))])
    for part in ("checks30", "checks36"):
        for case in range(15):
            report.take(part, {"kind": "logits", "case": f"decode after {case}", "ok": None, **logits})
        report.take(part, {"kind": "graphs", "ok": True, "sizes": list(range(12)), "differing": []})
        report.take(part, {"kind": "profile", "sequences": 1, "rows": [["k" * 44, 48.0, 12.3, 590.4, 0.1]] * 25})
        report.take(part, {"kind": "serve", "ok": False, "error": "x" * 500})
    assert len(capsys.readouterr().out) < 10_000
    assert len(report.bad) == 2
