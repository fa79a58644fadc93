"""Layer-major prefill: the order of layers and chunks, and whole engines with it against the same without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from freetoken import LLM, SamplingParams
from freetoken.models import llama, qwen3_next
from freetoken.run.layer_major import LayerMajorPass
from freetoken.schedule.engine_core import EngineCore
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.fakes import make_batch

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHUNK, WINDOW = 16, 64


# ------------------------------------------------------------------------------------------------ one pass


class Recorded:
    """A model and its strategy that note what is called; the hidden state counts the layers."""

    def __init__(self, layers: int, begins: bool) -> None:
        self.calls: list[object] = []
        kind = _Beginning if begins else _Layer
        self.layers = [kind(self, n) for n in range(layers)]
        self.model = self.moe = self
        self.attention: dict[str, object] = {}

    def prepare(self, batch: Any) -> Any:
        return batch

    def embed(self, batch: Any) -> torch.Tensor:
        return torch.zeros(batch.num_tokens, 1)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def begin_step(self, batch: Any) -> None:
        self.calls.append("begin step")

    def end_step(self) -> None:
        self.calls.append("end step")


class _Layer:
    def __init__(self, recorded: Recorded, number: int) -> None:
        self.recorded, self.number = recorded, number

    def forward(self, hidden: torch.Tensor, step: Any) -> torch.Tensor:
        self.recorded.calls.append((self.number, len(hidden)))
        return hidden + 1


class _Beginning(_Layer):
    def begin(self, hidden: torch.Tensor, step: Any) -> Any:
        self.recorded.calls.append(("begin", self.number, len(hidden)))
        return lambda: self.forward(hidden, step)


class _Foreseeing(_Beginning):
    def foresee(self, hidden: torch.Tensor) -> Any:
        self.recorded.calls.append(("foresee", self.number, len(hidden)))
        return (10 + self.number, torch.full((len(hidden), 1), self.number, dtype=torch.int32))


def batches() -> list[Any]:
    made = [make_batch((n,), (p,)) for n, p in ((3, 0), (4, 3), (2, 7))]

    class Step:
        def __init__(self, batch: Any) -> None:
            self.batch, self.num_tokens = batch, batch.num_tokens

    return [Step(batch) for batch in made]


def test_all_chunks_pass_a_layer_before_the_next() -> None:
    """Oracle: the order written out; one begin and one end of the strategy's step around it."""
    recorded = Recorded(2, begins=False)
    work = LayerMajorPass(recorded, batches())  # type: ignore[arg-type]
    assert [work.advance(), work.advance()] == [False, True]
    assert recorded.calls == [
        "begin step", (0, 3), (0, 4), (0, 2), (1, 3), (1, 4), (1, 2), "end step",
    ]  # fmt: skip
    assert work.logits().tolist() == [[2.0]]  # type: ignore[union-attr]


def test_every_chunk_is_begun_before_the_first_is_ended() -> None:
    """Oracle: the order written out, for layers that offer ``begin``."""
    recorded = Recorded(1, begins=True)
    assert LayerMajorPass(recorded, batches()).advance()  # type: ignore[arg-type]
    begun = [("begin", 0, 3), ("begin", 0, 4), ("begin", 0, 2)]
    assert recorded.calls == ["begin step", *begun, (0, 3), (0, 4), (0, 2), "end step"]


def test_the_next_layer_foresees_where_the_strategy_wants_hints() -> None:
    """Oracle: the order written out: each chunk is foreseen once begun, the hint comes before the first is ended, for
    all chunks at once, and the last layer has no next one."""
    recorded = Recorded(2, begins=True)
    recorded.layers = [_Foreseeing(recorded, n) for n in range(2)]
    hints = []
    recorded.foresees = True  # type: ignore[attr-defined]
    recorded.hint = lambda layer, experts: hints.append((layer, experts.flatten().tolist()))  # type: ignore[attr-defined]
    work = LayerMajorPass(recorded, batches())  # type: ignore[arg-type]
    work.advance()
    each = [item for n in (3, 4, 2) for item in (("begin", 0, n), ("foresee", 1, n))]
    assert recorded.calls == ["begin step", *each, (0, 3), (0, 4), (0, 2)]
    work.advance()
    assert hints == [(11, [1] * 9)]
    recorded.foresees = False  # type: ignore[attr-defined]
    LayerMajorPass(recorded, batches()).advance()  # type: ignore[arg-type]
    assert len(hints) == 1


def test_a_pass_that_is_given_up_ends_its_step_once() -> None:
    """Oracle: the strategy's calls; closing twice, or after the last layer, ends nothing more."""
    recorded = Recorded(2, begins=False)
    work = LayerMajorPass(recorded, batches())  # type: ignore[arg-type]
    work.advance()
    work.close()
    work.close()
    assert recorded.calls.count("end step") == 1


# ------------------------------------------------------------------------------------------------ whole engines


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    family = {"llama": llama, "qwen3_next": qwen3_next}[request.param].FAMILY
    path = write_tiny(family, tmp_path_factory.mktemp("tiny") / request.param)
    with _open(path) as engine:
        yield engine


def _open(path: Path) -> LLM:
    return LLM(
        str(path), dtype="float32", device="cpu", max_seq_len=256, max_prefill_tokens=CHUNK, max_running_requests=3,
        threads=1, warmup_policy="none",
    )  # fmt: skip


@pytest.fixture
def core(llm: LLM) -> Iterator[EngineCore]:
    """The engine's core with windows, its cache empty before and after."""
    core: EngineCore = llm.running.core
    plain = core.limits
    with_windows = evolve(plain, max_window_tokens=WINDOW)
    core.cache.drop_cached()
    core.limits = core.scheduler.limits = with_windows
    yield core
    core.limits = core.scheduler.limits = plain
    core.cache.drop_cached()
    assert core.cache.stats().pages_used == 0
    assert core.idle


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 200, (n,), generator=generator).tolist() for n in lengths]


def plain_tokens(llm: LLM, wanted: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """Each prompt alone, chunk by chunk."""
    core: EngineCore = llm.running.core
    limits = core.limits
    core.limits = core.scheduler.limits = evolve(limits, max_window_tokens=0)
    tokens = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in wanted]
    core.limits = core.scheduler.limits = limits
    core.cache.drop_cached()
    return tokens


def test_windows_give_the_tokens_of_chunks(llm: LLM, core: EngineCore) -> None:
    """Oracle: each prompt alone, chunk by chunk. Two windows, one, one chunk, less; together, and again cached."""
    wanted = prompts(100, 3, 60, CHUNK)
    expected = plain_tokens(llm, wanted)
    assert [c.token_ids for c in llm.generate(wanted, GREEDY)] == expected
    again = llm.generate(wanted, GREEDY)
    assert [c.token_ids for c in again] == expected
    assert again[0].cached_tokens >= 80, "what a window computed was not published"


def test_overlapped_steps_and_windows_give_the_tokens_of_chunks(llm: LLM, core: EngineCore) -> None:
    """Oracle: each prompt alone. The next step is planned before the last is read, as on a GPU."""
    wanted = prompts(5, 90, 40)
    expected = plain_tokens(llm, wanted)
    core.overlap = True
    try:
        assert [c.token_ids for c in llm.generate(wanted, GREEDY)] == expected
    finally:
        core.overlap = False


def test_a_running_request_gets_turns_between_layers(llm: LLM, core: EngineCore) -> None:
    """Oracle: tokens of the short request that come while the window is open, with a gap too short for one layer."""
    short, long = prompts(2, 100)
    core.limits = core.scheduler.limits = evolve(core.limits, max_gap_ms=0.001)
    core.submit("short", short, evolve(GREEDY, max_tokens=20))
    while not any(output.tokens for output in core.step()):
        pass
    core.submit("long", long, GREEDY)
    got = 0
    while core.scheduler.window is None:
        core.step()
    while core.scheduler.window is not None:
        got += sum(output.request_id == "short" for output in core.step())
    assert got >= len(llm.running.built.engine.runner.model.layers) - 1
    while not core.idle:
        core.step()


def test_nothing_is_published_before_the_last_layer_and_a_cancel_keeps_none(llm: LLM, core: EngineCore) -> None:
    """Oracle: the cache's own counts."""
    core.submit("long", prompts(100)[0], GREEDY)
    while core.scheduler.window is None:
        core.step()
    core.step()
    stats = core.cache.stats()
    assert stats.pages_used > 0
    assert stats.pages_cached == 0
    core.abort("long")
    stats = core.cache.stats()
    assert (stats.pages_used, stats.pages_cached, stats.snapshots) == (0, 0, 0)
    assert core.step() == []
    assert core.idle


def test_a_deadline_ends_a_window(llm: LLM, core: EngineCore) -> None:
    """Oracle: the output says so, and no page is kept."""
    core.submit("late", prompts(100)[0], GREEDY, deadline=core.scheduler.clock() + 1e6)
    while core.scheduler.window is None:
        core.step()
    core.scheduler.window.deadline = 0.0
    assert [output.finish for output in core.step()] == ["deadline"]
    assert core.cache.stats().pages_used == 0


def test_a_window_that_fails_fails_its_request_alone(
    llm: LLM, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the other request's tokens, each prompt alone."""
    short, long = prompts(4, 70)
    expected = plain_tokens(llm, [short])[0]

    def fail(*_: object) -> None:
        raise RuntimeError("out of ink")

    monkeypatch.setattr(LayerMajorPass, "advance", fail)
    core.submit("long", long, GREEDY)
    core.submit("short", short, GREEDY)
    tokens: list[int] = []
    errors = []
    while not core.idle:
        for output in core.step():
            tokens += output.tokens if output.request_id == "short" else ()
            errors += [output.request_id] if output.error is not None else []
    assert errors == ["long"]
    assert tuple(tokens) == expected
