"""The attention suite catches the faults it is there for: each broken backend fails the test that names its fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import Tensor

from freetoken.builtin.attention_torch import SPEC
from freetoken.ops.attention_plan import TorchPlan
from freetoken.ops.paged_attention import TorchAttention
from freetoken.plugin.protocols import AttentionLimits, AttentionSetup, BatchPlan
from freetoken.plugin.specs import AttentionBackendSpec
from freetoken.testing.attention import AttentionCase, AttentionConformance, attention_oracle
from freetoken.testing.fakes import make_batch, normal
from freetoken.vocab.batch import Batch


class ForgetsTheWindow(TorchAttention):
    def __init__(self, setup: AttentionSetup) -> None:
        cache = evolve(setup.group.cache, window=None)
        super().__init__(evolve(setup, group=evolve(setup.group, cache=cache)))


class ReadsWholePages(TorchAttention):
    """Sees the unwritten rest of the last page."""

    def plan(self, batch: Batch) -> BatchPlan:
        return super().plan(evolve(batch, prefix_lens=tuple(p + 1 for p in batch.prefix_lens)))


class KeepsOnePlan(TorchAttention):
    """A second plan overwrites the first."""

    newest: BatchPlan = None

    def plan(self, batch: Batch) -> BatchPlan:
        type(self).newest = super().plan(batch)
        return "the plan"

    def forward(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int, plan: BatchPlan) -> Tensor:
        return super().forward(q, k_pool, v_pool, layer, type(self).newest)


class IgnoresTheScale(TorchAttention):
    def __init__(self, setup: AttentionSetup) -> None:
        super().__init__(evolve(setup, group=evolve(setup.group, scale=setup.group.head_dim**-0.5)))


class WritesItsQueries(TorchAttention):
    def forward(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int, plan: BatchPlan) -> Tensor:
        out = super().forward(q, k_pool, v_pool, layer, plan)
        return q.copy_(out)


class SharesHeadsWrongly(TorchAttention):
    """Query head h reads key head h mod Hkv."""

    def forward(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int, plan: BatchPlan) -> Tensor:
        heads, shared = q.shape[1], self._shared
        order = torch.arange(heads).view(shared, -1).T.reshape(-1)
        out = super().forward(q[:, order], k_pool, v_pool, layer, plan)
        return out[:, order.argsort()]


def case(backend: type[TorchAttention], window: int | None = None, **more: object) -> AttentionCase:
    spec: AttentionBackendSpec = evolve(SPEC, create=backend, **more)
    return AttentionCase(spec, "cpu", "float32", 16, window, 4)


@pytest.mark.parametrize(
    ("broken", "test", "args"),
    [
        (case(ForgetsTheWindow, window=7), "test_equals_softmax", ((1, 6), (33, 0))),
        (case(ReadsWholePages), "test_equals_softmax", ((1,), (17,))),
        (case(KeepsOnePlan), "test_many_plans_live_at_once", ()),
        (case(IgnoresTheScale), "test_scale_is_the_groups", ()),
        (case(WritesItsQueries), "test_pools_and_queries_are_left_alone", ()),
        (case(SharesHeadsWrongly), "test_every_head_sharing", ()),
    ],
    ids=lambda value: value.spec.create.__name__ if isinstance(value, AttentionCase) else None,
)
def test_a_fault_is_caught(broken: AttentionCase, test: str, args: tuple[object, ...]) -> None:
    """Oracle: the same test passes for the backend as it is, and fails for the broken one."""
    suite = AttentionConformance()
    getattr(suite, test)(evolve(broken, spec=SPEC), *args)
    with pytest.raises((AssertionError, RuntimeError)):
        getattr(suite, test)(broken, *args)


def test_a_backend_that_declares_graphs_must_bring_them() -> None:
    """Oracle: a spec that claims graphs over a backend without: the suite asks for a capture and gets an error."""
    with pytest.raises(Exception, match="graph"):
        AttentionConformance().test_graph_plans_follow_the_batch(case(TorchAttention, graphs=True))


class Replays(TorchAttention):
    """Graph plans without a graph: replay swaps the plan's insides; ``fresh`` false forgets to."""

    fresh = True

    def reserve_graph(self, limits: AttentionLimits) -> None:
        return None

    def release_graph(self) -> None:
        return None

    def plan_capture(self, batch: Batch) -> BatchPlan:
        return [self.plan(batch)]

    def plan_replay(self, plan: BatchPlan, batch: Batch) -> None:
        assert isinstance(plan, list)
        if self.fresh:
            plan[0] = self.plan(batch)

    def forward(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int, plan: BatchPlan) -> Tensor:
        step = plan if isinstance(plan, TorchPlan) else plan[0]  # type: ignore[index]
        return super().forward(q, k_pool, v_pool, layer, step)


class ReplaysStale(Replays):
    fresh = False


def test_a_stale_replay_is_caught() -> None:
    """Oracle: a backend that brings plans up to date passes, one that does not fails."""
    suite = AttentionConformance()
    suite.test_graph_plans_follow_the_batch(case(Replays, graphs=True))
    with pytest.raises(AssertionError):
        suite.test_graph_plans_follow_the_batch(case(ReplaysStale, graphs=True))


def test_the_matrix_is_what_the_spec_declares() -> None:
    """Oracle: the product of the declared axes."""

    class Narrow(AttentionConformance):
        spec = f"{__name__}:NARROW"

    found = Narrow.cases()
    assert {c.head_dim for c in found} == {64, 128}
    assert {c.window for c in found} == {None}
    assert {c.page_tokens for c in found} == {32}
    assert {c.dtype for c in found} == {"bfloat16"}
    assert len(found) == 2


NARROW = evolve(
    SPEC, dtypes=frozenset({"bfloat16"}), devices=frozenset({"cpu"}), head_dims=frozenset({64, 128}), windows=False,
    page_tokens=(32,),
)  # fmt: skip


def test_the_oracle_is_softmax_attention() -> None:
    """Oracle: torch's scaled_dot_product_attention in float64, causal, one sequence."""
    randn = normal(1)
    batch = make_batch((6,), (0,))
    q, k, v = randn(6, 4, 8), randn(6, 2, 8), randn(6, 2, 8)
    heads = [t.transpose(0, 1).double() for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(attention_oracle(q, [k], [v], batch, 0.5, None), want.transpose(0, 1))


def test_a_strangers_file_runs(tmp_path: Path) -> None:
    """Oracle: pytest itself, on the three lines that the documentation tells a stranger to write."""
    file = tmp_path / "test_mine.py"
    file.write_text(
        "from freetoken.testing.attention import AttentionConformance\n"
        "class TestMine(AttentionConformance):\n"
        "    spec = 'freetoken.builtin.attention_torch:SPEC'\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        "test_scale and cpu-float32",
        "-p",
        "no:cacheprovider",
        str(file),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
