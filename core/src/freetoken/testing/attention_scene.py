"""Scenes for attention backends: a point of the matrix, a batch over poisoned pools, and what must come out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from freetoken.plugin.protocols import AttentionBackend, AttentionLimits, AttentionSetup
from freetoken.plugin.specs import AttentionBackendSpec
from freetoken.testing.fakes import make_batch, make_device, normal, pages_needed, sequence_slots
from freetoken.testing.tolerances import assert_close
from freetoken.vocab.batch import Batch
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.model_spec import AttentionGroup


@frozen
class AttentionCase:
    """One point of the matrix."""

    spec: AttentionBackendSpec = field(eq=False)
    device: str
    dtype: str
    head_dim: int
    window: int | None
    page_tokens: int

    def __str__(self) -> str:
        window = f"w{self.window}" if self.window else "full"
        return f"{self.spec.name}-{self.device}-{self.dtype}-d{self.head_dim}-{window}-p{self.page_tokens}"


@frozen(eq=False)
class Scene:
    """A batch with its K and V in poisoned pools, the queries, and what attention must give."""

    batch: Batch
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    expected: Tensor


def attention_oracle(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], batch: Batch, scale: float, window: int | None
) -> Tensor:
    """Plain softmax attention in float64, one token and one head at a time.

    ``q [T, Hq, D]``; ``keys[b]`` and ``values[b]`` ``[context, Hkv, D]`` of each sequence → ``[T, Hq, Dv]``.
    """
    out = q.new_zeros(*q.shape[:2], values[0].shape[-1], dtype=torch.float64, device="cpu")
    row = 0
    for b, (length, prefix) in enumerate(zip(batch.query_lens, batch.prefix_lens, strict=True)):
        k, v = keys[b].double().cpu(), values[b].double().cpu()
        share = q.shape[1] // k.shape[1]
        for position in range(prefix, prefix + length):
            first = 0 if window is None else max(0, position + 1 - window)
            seen = slice(first, position + 1)
            for head in range(q.shape[1]):
                scores = k[seen, head // share] @ q[row, head].double().cpu() * scale
                out[row, head] = torch.softmax(scores, dim=0) @ v[seen, head // share]
            row += 1
    return out


def make_backend(
    case: AttentionCase, heads: tuple[int, int], scale: float | None = None, layers: tuple[int, ...] = (0,)
) -> AttentionBackend:
    """The case's backend for a group with these heads."""
    return case.spec.create(attention_setup(case, heads, scale or case.head_dim**-0.5, layers))


def make_scene(
    case: AttentionCase,
    heads: tuple[int, int],
    query_lens: tuple[int, ...],
    prefix_lens: tuple[int, ...],
    *,
    contiguous: bool = False,
    scale: float | None = None,
    seed: int = 0,
    values_seed: int | None = None,
    num_pages: int | None = None,
) -> Scene:
    """Random q, K and V for a batch; every pool row that the batch does not own is NaN, page 0 included."""
    q_heads, kv_heads = heads
    randn = normal(values_seed if values_seed is not None else seed, case.device, getattr(torch, case.dtype))
    total = num_pages or 2 * pages_needed(query_lens, prefix_lens, case.page_tokens) + 2
    batch = make_batch(
        query_lens, prefix_lens, case.page_tokens, device=case.device, contiguous=contiguous, seed=seed, num_pages=total
    )
    pool_shape = (total, case.page_tokens, kv_heads, case.head_dim)
    pools = [torch.full(pool_shape, float("nan"), dtype=getattr(torch, case.dtype), device=case.device) for _ in "kv"]
    contents: list[list[Tensor]] = [[], []]
    for b in range(batch.num_sequences):
        slots = sequence_slots(batch, b, case.page_tokens)
        for pool, content in zip(pools, contents, strict=True):
            content.append(randn(len(slots), kv_heads, case.head_dim))
            pool.view(-1, kv_heads, case.head_dim)[slots] = content[-1]
    q = randn(batch.num_tokens, q_heads, case.head_dim)
    used = scale or case.head_dim**-0.5
    return Scene(batch, q, pools[0], pools[1], attention_oracle(q, contents[0], contents[1], batch, used, case.window))


def check(
    case: AttentionCase, backend: AttentionBackend, plan: object, scene: Scene, what: str = "attention", layer: int = 0
) -> None:
    """One forward against the scene's oracle."""
    out = backend.forward(scene.q, scene.k_pool, scene.v_pool, layer, plan)
    assert out.dtype == scene.q.dtype, f"{what}: {out.dtype}, but q is {scene.q.dtype}"
    assert not out.isnan().any(), f"{what}: a NaN of a page that nobody owns, or of the output's memory, leaked"
    assert_close(out, scene.expected, case.dtype, case.head_dim, what)


def attention_limits(case: AttentionCase) -> AttentionLimits:
    """Limits that every scene of the suite stays within."""
    return AttentionLimits(case.page_tokens, max_seq_tokens=2048, max_running_requests=8, max_prefill_tokens=64)


def attention_group(
    case: AttentionCase, heads: tuple[int, int], scale: float, layers: tuple[int, ...]
) -> AttentionGroup:
    """A group of like layers at this point of the matrix."""
    cache = PagedKV(heads[1], case.head_dim, case.head_dim, case.dtype, case.window)
    return AttentionGroup("layers under test", layers, heads[0], cache, scale)


def attention_setup(
    case: AttentionCase, heads: tuple[int, int], scale: float, layers: tuple[int, ...]
) -> AttentionSetup:
    """What the case's backend is made from, with its options at their defaults."""
    options = case.spec.options() if case.spec.options is not None else None
    group = attention_group(case, heads, scale, layers)
    return AttentionSetup(group, make_device(case.device), case.dtype, attention_limits(case), options)
