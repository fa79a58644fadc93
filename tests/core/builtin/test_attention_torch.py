"""The built-in torch attention: the conformance suite, and what only this backend promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from freetoken.builtin.attention_torch import SPEC, workspace
from freetoken.ops import attention_plan
from freetoken.ops.paged_attention import TorchAttention
from freetoken.plugin.protocols import AttentionLimits, AttentionSetup
from freetoken.testing.attention import AttentionConformance
from freetoken.testing.fakes import make_batch, normal, sequence_slots
from freetoken.testing.tolerances import assert_close
from freetoken.vocab.batch import Batch
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import AttentionGroup

PAGE = 16


class TestConformance(AttentionConformance):
    spec = "freetoken.builtin.attention_torch:freetoken_attention_backends"


def setup(cache: PagedKV, q_heads: int = 4, dtype: str = "float32") -> AttentionSetup:
    group = AttentionGroup("group", (0,), q_heads, cache, cache.k_dim**-0.5)
    return AttentionSetup(group, Device(), dtype, AttentionLimits(PAGE, 8192, 64, 4096))


def filled(batch: Batch, cache: PagedKV, pages: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pools that hold random rows where the batch owns them and NaN elsewhere."""
    pools = []
    for dim in (cache.k_dim, cache.v_dim):
        pool = torch.full((pages, PAGE, cache.heads, dim), float("nan"), dtype=getattr(torch, cache.dtype))
        randn = normal(seed + dim, dtype=pool.dtype)
        for b in range(batch.num_sequences):
            slots = sequence_slots(batch, b, PAGE)
            pool.view(-1, cache.heads, dim)[slots] = randn(len(slots), cache.heads, dim)
        pools.append(pool)
    return pools[0], pools[1]


def by_sdpa(q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, window: int | None = None) -> Tensor:
    """Each sequence through torch's attention in float64 with a mask written out."""
    outs = []
    for b, (length, prefix) in enumerate(zip(batch.query_lens, batch.prefix_lens, strict=True)):
        slots = sequence_slots(batch, b, PAGE)
        k, v = (p.flatten(0, 1)[slots].double().transpose(0, 1).unsqueeze(0) for p in (k_pool, v_pool))
        start = int(batch.query_starts[b])
        rows = q[start : start + length].double().transpose(0, 1).unsqueeze(0)
        at, key = torch.arange(prefix, prefix + length).unsqueeze(1), torch.arange(prefix + length)
        mask = (key <= at) & (key > at - (window or 10**9))
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def run(cache: PagedKV, lens: tuple[Sequence[int], Sequence[int]], dtype: str = "float32") -> None:
    """One forward over scattered pages against ``by_sdpa``."""
    batch = make_batch(*lens, PAGE, num_pages=800)
    k_pool, v_pool = filled(batch, cache, 800)
    q = normal(7, dtype=getattr(torch, dtype))(batch.num_tokens, 4, cache.k_dim)
    backend = TorchAttention(setup(cache, dtype=dtype))
    out = backend.forward(q, k_pool, v_pool, 0, backend.plan(batch))
    assert_close(out, by_sdpa(q, k_pool, v_pool, batch, cache.window), dtype, cache.k_dim)


@pytest.mark.parametrize("window", [None, 40])
def test_decode_in_several_groups(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's attention in float64, for contexts so uneven that they are padded apart, out of order."""
    monkeypatch.setattr(attention_plan, "PADDING_TOKENS", 0)
    run(PagedKV(2, 32, 32, "float32", window), ((1,) * 6, (700, 3, 90, 650, 9, 100)))


def test_decode_in_groups_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's attention in float64, where the limit of gathered bytes cuts equal contexts into groups."""
    monkeypatch.setattr(attention_plan, "GATHER_LIMIT_BYTES", 2 * 101 * 2 * 64 * 4)
    run(PagedKV(2, 32, 32, "float32"), ((1,) * 5, (100,) * 5))


@pytest.mark.parametrize("window", [None, 1, 50, 300])
@pytest.mark.parametrize("prefix", [0, 130])
def test_prefill_in_blocks(prefix: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's attention in float64, with blocks of 16 rows, the last one shorter."""
    monkeypatch.setattr(attention_plan, "MASK_LIMIT_BYTES", 1024)
    run(PagedKV(2, 32, 32, "float32", window), ((37, 203), (prefix, prefix)))


def test_values_of_another_width() -> None:
    """Oracle: torch's attention in float64, V half as wide as K, for prefill, extend and decode in one batch."""
    run(PagedKV(2, 32, 16, "float32"), ((40, 1, 9, 1), (0, 50, 33, 7)))


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_cache_of_another_dtype(contiguous: bool) -> None:
    """Oracle: torch's attention in float64 on what the bfloat16 pools hold, computed in float32."""
    cache = PagedKV(2, 32, 32, "bfloat16")
    batch = make_batch((6, 1), (0, 20), PAGE, num_pages=50, contiguous=contiguous)
    k_pool, v_pool = filled(batch, cache, 50)
    q = normal(3)(batch.num_tokens, 4, 32)
    backend = TorchAttention(setup(cache))
    out = backend.forward(q, k_pool, v_pool, 0, backend.plan(batch))
    assert_close(out, by_sdpa(q, k_pool, v_pool, batch), "float32", 32)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return out


@pytest.mark.parametrize(("length", "prefix"), [(1024, 3072), (2048, 0)])
def test_a_long_prompt_makes_no_scores(length: int, prefix: int) -> None:
    """Oracle: the declared workspace. All scores of these prompts would take 134 MB; no tensor takes a quarter."""
    cache = PagedKV(2, 32, 32, "float32")
    batch = make_batch((length,), (prefix,), PAGE, num_pages=300)
    k_pool, v_pool = filled(batch, cache, 300)
    q = normal(1)(length, 8, 32)
    backend = TorchAttention(setup(cache, q_heads=8))
    with LargestTensor() as largest:
        backend.forward(q, k_pool, v_pool, 0, backend.plan(batch))
    assert largest.num_bytes <= 2 * attention_plan.MASK_LIMIT_BYTES
    assert largest.num_bytes <= sum(claim.worst_bytes for claim in workspace(setup(cache, q_heads=8)))


def test_a_decode_step_stays_within_its_workspace() -> None:
    """Oracle: the declared peak, for 64 sequences of 200 tokens with heads so wide that the limit cuts."""
    cache = PagedKV(8, 256, 256, "float32")
    batch = make_batch((1,) * 64, (200,) * 64, PAGE, num_pages=900)
    pool = torch.zeros(900, PAGE, 8, 256)
    backend = TorchAttention(setup(cache, q_heads=8))
    with LargestTensor() as largest:
        backend.forward(torch.zeros(64, 8, 256), pool, pool, 0, backend.plan(batch))
    views = pool.numel() * 4  # seeing the pool as rows is no allocation
    assert len(attention_plan.decode_groups(range(64), [201] * 64, backend._geometry)) > 1
    assert sum(t.numel() * t.element_size() for t in backend._scratch.values()) <= attention_plan.GATHER_LIMIT_BYTES
    assert largest.num_bytes <= max(views, attention_plan.GATHER_LIMIT_BYTES)


def test_what_it_does_not_serve_is_refused() -> None:
    """Oracle: the spec's facts."""
    with pytest.raises(EngineError, match="float64"):
        SPEC.create(evolve(setup(PagedKV(2, 32, 32, "float32")), dtype="float64"))


def test_either_mode_of_torch_may_call() -> None:
    """Oracle: torch itself, which refuses writes from outside to what inference mode made."""
    cache = PagedKV(2, 32, 32, "float32")
    batch = make_batch((1, 1), (9, 20), PAGE, num_pages=50)
    k_pool, v_pool = filled(batch, cache, 50)
    backend, q = TorchAttention(setup(cache)), normal(1)(2, 4, 32)
    with torch.inference_mode():
        inside = backend.forward(q, k_pool, v_pool, 0, backend.plan(batch))
    assert torch.equal(backend.forward(q, k_pool, v_pool, 0, backend.plan(batch)), inside)
