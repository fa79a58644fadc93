"""What every attention backend must do, as a test class that a plugin's author subclasses.

    class TestMine(AttentionConformance):
        spec = "my_package.plugin:SPEC"

The matrix (dtypes × head sizes × windows × page sizes) comes from what the spec declares; class attributes narrow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.plugin.protocols import AttentionBackend, AttentionLimits
from freetoken.testing.attention_scene import (
    AttentionCase,
    Scene,
    attention_group,
    attention_limits,
    attention_oracle,
    attention_setup,
    check,
    make_backend,
    make_scene,
)
from freetoken.testing.fakes import device_kinds, device_marks, load_specs
from freetoken.testing.tolerances import assert_close
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.errors import FreeTokenError
from freetoken.vocab.model_spec import AttentionGroup
from freetoken.vocab.units import ceil_div

__all__ = ["AttentionCase", "AttentionConformance", "attention_oracle", "check", "make_backend", "make_scene"]

POOL_TOKENS = 256  # of pools that several batches share


class AttentionConformance:
    """Subclass as ``TestSomething`` and set ``spec``. Needs nothing but pytest.

    ``heads`` are (query, key-value) head counts. Where a spec says "any", ``any_head_dims`` and ``any_page_tokens`` are
    tried. ``devices`` and ``dtypes``, where set, replace what the spec declares. ``long_context`` is the longest one.
    """

    spec: str
    heads = ((6, 2), (4, 4), (8, 1))
    any_head_dims = (64, 80)
    any_page_tokens = (16, 1)
    window = 7
    long_context = 1500
    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            cases = [pytest.param(c, id=str(c), marks=device_marks(c.device)) for c in self.cases()]
            metafunc.parametrize("case", cases)

    @classmethod
    def cases(cls) -> list[AttentionCase]:
        """The matrix of every spec that ``spec`` names."""
        found = []
        for spec in load_specs(cls.spec):
            windows = (None, cls.window) if spec.windows else (None,)
            axes: tuple[Sequence[Any], ...] = (
                cls.devices or device_kinds(spec.devices),
                cls.dtypes or sorted(spec.dtypes),
                sorted(spec.head_dims) or cls.any_head_dims,
                windows,
                spec.page_tokens or cls.any_page_tokens,
            )
            found += [AttentionCase(spec, *point) for point in product(*axes)]
        return found

    # ------------------------------------------------------------------------------------------------ the tests

    @pytest.mark.parametrize(
        ("query_lens", "prefix_lens"),
        [
            pytest.param((1,), (0,), id="a-single-token"),
            pytest.param((5, 1, 12), (0, 0, 0), id="ragged-prefill"),
            pytest.param((1,), (18,), id="decode-one"),
            pytest.param((1, 1, 1, 1), (15, 16, 17, 1), id="decode-ragged"),
            pytest.param((3, 1, 7), (20, 0, 9), id="extend"),
            pytest.param((1, 6, 1, 4), (33, 0, 2, 16), id="mixed"),
            pytest.param((15, 16, 17), (0, 0, 0), id="around-a-page"),
            pytest.param((1, 1, 1), (14, 15, 16), id="decode-around-a-page"),
            pytest.param((2, 2, 2), (15, 16, 14), id="extend-over-a-page"),
            pytest.param((1, 1), (1, 70), id="decode-uneven"),
        ],
    )
    def test_equals_softmax(
        self, case: AttentionCase, query_lens: tuple[int, ...], prefix_lens: tuple[int, ...]
    ) -> None:
        """Oracle: naive softmax in float64. Every page that the batch does not own is NaN."""
        backend = make_backend(case, self.heads[0])
        scene = make_scene(case, self.heads[0], query_lens, prefix_lens)
        check(case, backend, backend.plan(scene.batch), scene)

    def test_every_head_sharing(self, case: AttentionCase) -> None:
        """Oracle: naive softmax, for as many key heads as query heads, for one, and between."""
        for heads in self.heads:
            scene = make_scene(case, heads, (4, 1), (3, 9))
            backend = make_backend(case, heads)
            check(case, backend, backend.plan(scene.batch), scene, f"{heads[0]} heads over {heads[1]}")

    def test_long_contexts(self, case: AttentionCase) -> None:
        """Oracle: naive softmax, for contexts that a backend may split among several workers and join again."""
        backend = make_backend(case, self.heads[0])
        for lens in (((1,), (self.long_context,)), ((1, 3), (self.long_context // 2, self.long_context))):
            scene = make_scene(case, self.heads[0], *lens)
            check(case, backend, backend.plan(scene.batch), scene, str(lens))

    def test_pages_in_one_piece(self, case: AttentionCase) -> None:
        """Oracle: naive softmax, where a sequence's pages follow one another."""
        backend = make_backend(case, self.heads[0])
        for lens in (((1,), (40,)), ((9,), (21,)), ((1, 1), (30, 5))):
            scene = make_scene(case, self.heads[0], *lens, contiguous=True)
            check(case, backend, backend.plan(scene.batch), scene, str(lens))

    def test_scale_is_the_groups(self, case: AttentionCase) -> None:
        """Oracle: naive softmax with a scale that is not 1/√D."""
        backend = make_backend(case, self.heads[0], scale=0.3)
        scene = make_scene(case, self.heads[0], (3, 1), (2, 20), scale=0.3)
        check(case, backend, backend.plan(scene.batch), scene)

    def test_one_plan_serves_all_layers(self, case: AttentionCase) -> None:
        """Oracle: naive softmax for each of two layers' pools under one plan, then the first layer again."""
        backend = make_backend(case, self.heads[0], layers=(0, 3))
        first = make_scene(case, self.heads[0], (2, 1), (5, 17), seed=1)
        second = make_scene(case, self.heads[0], (2, 1), (5, 17), seed=1, values_seed=2)
        plan = backend.plan(first.batch)
        for layer, scene in ((0, first), (3, second), (0, first)):
            check(case, backend, plan, scene, f"layer {layer}", layer=layer)

    def test_many_plans_live_at_once(self, case: AttentionCase) -> None:
        """Oracle: naive softmax, with every plan made before the first is used and used out of order, twice."""
        backend = make_backend(case, self.heads[0])
        lens = [((1, 1), (9, 30)), ((6,), (0,)), ((1,), (50,)), ((4, 1), (12, 3)), ((1, 1), (40, 2))]
        pages = ceil_div(POOL_TOKENS, case.page_tokens)
        scenes = [make_scene(case, self.heads[0], *pair, seed=n, num_pages=pages) for n, pair in enumerate(lens)]
        plans = [backend.plan(scene.batch) for scene in scenes]
        for n in (3, 0, 4, 2, 1, 0, 3):
            check(case, backend, plans[n], scenes[n], f"plan {n}")

    def test_queries_may_be_a_slice_of_a_wider_row(self, case: AttentionCase) -> None:
        """Oracle: naive softmax, where q is a part of a fused projection, its rows farther apart than its width."""
        backend = make_backend(case, self.heads[0])
        for lens in (((1, 1), (4, 9)), ((5,), (3,))):
            scene = make_scene(case, self.heads[0], *lens)
            tokens, q_heads, dim = scene.q.shape
            wide = torch.full((tokens, q_heads + 2, dim), float("nan"), dtype=scene.q.dtype, device=scene.q.device)
            wide[:, :q_heads] = scene.q
            out = backend.forward(wide[:, :q_heads], scene.k_pool, scene.v_pool, 0, backend.plan(scene.batch))
            assert_close(out, scene.expected, case.dtype, case.head_dim, str(lens))

    def test_pools_and_queries_are_left_alone(self, case: AttentionCase) -> None:
        """Oracle: copies taken before."""
        backend = make_backend(case, self.heads[0])
        scene = make_scene(case, self.heads[0], (3, 1), (8, 16))
        before = [t.clone() for t in (scene.q, scene.k_pool, scene.v_pool)]
        backend.forward(scene.q, scene.k_pool, scene.v_pool, 0, backend.plan(scene.batch))
        for name, old, new in zip("qkv", before, (scene.q, scene.k_pool, scene.v_pool), strict=True):
            assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0)), f"{name} was written"

    def test_graph_plans_follow_the_batch(self, case: AttentionCase) -> None:
        """Oracle: naive softmax for each replay; on a CUDA device through a captured graph. Where the spec declares no
        graphs, asking for one is an error that says so."""
        backend = make_backend(case, self.heads[0])
        limits = attention_limits(case)
        if not case.spec.graphs:
            with pytest.raises(FreeTokenError):
                backend.reserve_graph(limits)
            return
        replay_many(case, backend, limits, self.heads[0])

    def test_undeclared_is_refused(self, case: AttentionCase) -> None:
        """Oracle: the spec's own facts. What it does not declare, ``serves`` refuses with a reason."""
        spec = case.spec
        group = attention_group(case, self.heads[0], 1.0, (0,))
        assert spec.serves(group, case.dtype), spec.serves(group, case.dtype).reason
        for dtype in {"float32", "bfloat16", "float16", "float64"} - spec.dtypes:
            assert dtype in spec.serves(group, dtype).reason
        cache = PagedKV(self.heads[0][1], case.head_dim, case.head_dim, case.dtype, window=5)
        windowed = AttentionGroup("windowed", (0,), self.heads[0][0], cache, 1.0)
        if not spec.windows:
            assert "window" in spec.serves(windowed, case.dtype).reason
        if spec.head_dims:
            odd = PagedKV(1, max(spec.head_dims) + 1, max(spec.head_dims) + 1, case.dtype)
            refused = spec.serves(AttentionGroup("odd", (0,), 1, odd, 1.0), case.dtype)
            assert str(odd.k_dim) in refused.reason

    def test_workspace_is_declared_before_it_is_taken(self, case: AttentionCase) -> None:
        """Oracle: the claims' own arithmetic. Pure, and never negative."""
        setup = attention_setup(case, self.heads[0], 1.0, (0,))
        claims = case.spec.workspace(setup)
        assert claims == case.spec.workspace(setup)
        assert all(claim.steady_bytes >= 0 and claim.worst_bytes >= claim.steady_bytes for claim in claims)


def replay_many(
    case: AttentionCase, backend: AttentionBackend, limits: AttentionLimits, heads: tuple[int, int]
) -> None:
    """Captures plans for two batch sizes at once, then replays each with batches that it was not captured for."""
    backend.reserve_graph(limits)
    pages = ceil_div(POOL_TOKENS, case.page_tokens)
    try:
        replays = {}
        for size in (1, 3):
            first = make_scene(case, heads, (1,) * size, (1,) * size, seed=size, num_pages=pages)
            replays[size] = _Replay(case, backend, first)
        for size, prefixes in ((3, (9, 30, 17)), (1, (63,)), (3, (1, 1, 64)), (1, (15,)), (3, (16, 15, 14))):
            scene = make_scene(case, heads, (1,) * size, prefixes, seed=sum(prefixes), num_pages=pages)
            out = replays[size].run(scene)
            assert_close(out, scene.expected, case.dtype, case.head_dim, f"replay of {size} at {prefixes}")
    finally:
        backend.release_graph()


class _Replay:
    """A captured forward on static tensors; without a CUDA device the forward is simply called again."""

    def __init__(self, case: AttentionCase, backend: AttentionBackend, scene: Scene) -> None:
        self._backend = backend
        self._q, self._k, self._v = scene.q.clone(), scene.k_pool.clone(), scene.v_pool.clone()
        self._plan = backend.plan_capture(scene.batch)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out = self._forward()
        if case.device == "cuda":
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._out = self._forward()

    def run(self, scene: Scene) -> Tensor:
        for static, new in ((self._q, scene.q), (self._k, scene.k_pool), (self._v, scene.v_pool)):
            static.copy_(new)
        self._backend.plan_replay(self._plan, scene.batch)
        if self._graph is None:
            return self._forward()
        self._out.fill_(float("nan"))
        self._graph.replay()
        return self._out

    def _forward(self) -> Tensor:
        return self._backend.forward(self._q, self._k, self._v, 0, self._plan)
