"""Attention over paged keys and values in plain torch: the reference backend, and the one a CPU serves with."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from freetoken.ops.attention_plan import MAX_BLOCK_ROWS, DecodePart, Geometry, Keys, PrefillPart, TorchPlan, plan_step
from freetoken.plugin.protocols import AttentionLimits, AttentionSetup, BatchPlan
from freetoken.vocab.batch import Batch
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.errors import EngineError

SCORES_LIMIT_BYTES = 64 << 20  # where a library call cannot avoid making the scores of a block


class TorchAttention:
    """Implements ``plugin.protocols.AttentionBackend``; see ``attention_plan`` for what a plan holds.

    Query heads that share a key head are laid along the query axis (decode) or along a broadcast batch axis (prefill),
    so keys and values are never repeated. Gathered keys and values use scratch memory of the backend, which is free
    again when ``forward`` returns.
    """

    def __init__(self, setup: AttentionSetup) -> None:
        cache = setup.group.cache
        self._scale = setup.group.scale
        self._shared = setup.group.q_heads // cache.heads
        self._dtype: torch.dtype = getattr(torch, setup.dtype)
        self._scratch: dict[str, Tensor] = {}
        whole = cache.k_dim == cache.v_dim
        rows = MAX_BLOCK_ROWS
        if not whole:
            scores = 4 * setup.group.q_heads * setup.limits.max_seq_tokens
            rows = max(1, min(rows, SCORES_LIMIT_BYTES // scores))
        token_bytes = cache.heads * (cache.k_dim + cache.v_dim) * itemsize_bytes(setup.dtype)
        self._geometry = Geometry(setup.limits.page_tokens, cache.heads, token_bytes, cache.window, rows, whole)

    def plan(self, batch: Batch) -> BatchPlan:
        """A ``TorchPlan`` that owns its state."""
        return plan_step(batch, self._geometry, self._dtype)

    def forward(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int, plan: BatchPlan) -> Tensor:
        """``q [T, Hq, D]``, pools ``[pages, P, Hkv, D]`` → ``[T, Hq, Dv]`` in q's dtype."""
        step = cast(TorchPlan, plan)
        if len(step.decode) == 1 and step.decode[0].rows is None:
            return self._decode(q, k_pool, v_pool, step.decode[0])
        out = q.new_empty(step.tokens, q.shape[1], v_pool.shape[-1])
        for part in step.decode:
            assert part.rows is not None, "a part without rows is the whole batch"
            out.index_copy_(0, part.rows, self._decode(q.index_select(0, part.rows), k_pool, v_pool, part))
        for prompt in step.prefill:
            self._prefill(q[prompt.low : prompt.high], k_pool, v_pool, prompt, step.band, out)
        return out

    def reserve_graph(self, limits: AttentionLimits) -> None:
        raise _no_graphs()

    def plan_capture(self, batch: Batch) -> BatchPlan:
        raise _no_graphs()

    def plan_replay(self, plan: BatchPlan, batch: Batch) -> None:
        raise _no_graphs()

    def release_graph(self) -> None:
        raise _no_graphs()

    def _decode(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, part: DecodePart) -> Tensor:
        """``q [n, Hq, D]`` → ``[n, Hq, Dv]``: the query heads of one key head are rows of one small attention."""
        rows = q.view(part.count, -1, self._shared, q.shape[-1])
        k = self._keys("k", k_pool, part.keys, part.count, q.dtype)
        v = self._keys("v", v_pool, part.keys, part.count, q.dtype)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=part.mask, scale=self._scale)
        return out.reshape(part.count, q.shape[1], -1)

    def _prefill(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, part: PrefillPart, band: Tensor | None, out: Tensor
    ) -> None:
        """One sequence, ``q [L, Hq, D]``; writes rows ``[low, high)`` of ``out``."""
        heads = q.view(q.shape[0], -1, self._shared, q.shape[-1]).permute(2, 1, 0, 3)  # [G, Hkv, L, D]
        k = self._keys("k", k_pool, part.keys, 1, q.dtype).expand(self._shared, -1, -1, -1)
        v = self._keys("v", v_pool, part.keys, 1, q.dtype).expand(self._shared, -1, -1, -1)
        for block in part.blocks:
            keys = slice(block.key_low, block.key_high)
            mask = None if block.causal else _corner(band, block.high - block.low, block.key_high - block.key_low)
            piece = F.scaled_dot_product_attention(
                heads[:, :, block.low : block.high], k[:, :, keys], v[:, :, keys],
                attn_mask=mask, is_causal=block.causal, scale=self._scale,
            )  # fmt: skip
            rows = slice(part.low + block.low, part.low + block.high)
            out[rows].view(piece.shape[2], piece.shape[1], piece.shape[0], -1).copy_(piece.permute(2, 1, 0, 3))

    def _keys(self, name: str, pool: Tensor, keys: Keys, count: int, dtype: torch.dtype) -> Tensor:
        """Keys or values as ``[n, Hkv, C, D]`` in ``dtype``: a view of the pool, or gathered into scratch memory."""
        heads, dim = pool.shape[-2:]
        if keys.index is None:
            shape, strides = (1, heads, keys.stop - keys.start, dim), (0, dim, heads * dim, 1)
            view = pool.as_strided(shape, strides, pool.storage_offset() + keys.start * heads * dim)
            return view if pool.dtype == dtype else view.to(dtype)  # a call that changes nothing costs a µs too
        size = keys.index.numel() * dim
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < size or scratch.dtype != pool.dtype:
            # A new block of this size each call would be mapped and faulted in anew by the C library every time.
            with torch.inference_mode(False):  # so that both modes may write to it
                scratch = self._scratch[name] = torch.empty(size, dtype=pool.dtype, device=pool.device)
        rows = scratch[:size].view(-1, dim)
        torch.index_select(pool.view(-1, dim), 0, keys.index, out=rows)
        gathered = rows.view(count, heads, -1, dim)
        return gathered if pool.dtype == dtype else gathered.to(dtype)


def _corner(band: Tensor | None, rows: int, columns: int) -> Tensor:
    """The rectangle of the band for ``rows`` query rows whose last one sees the last of ``columns`` keys."""
    assert band is not None, "a plan with masked blocks brings their band"
    stop = band.shape[1] - (band.shape[0] - rows)
    return band[:rows, stop - columns : stop]


def _no_graphs() -> EngineError:
    return EngineError("a CUDA graph of torch attention", "the backend declares graphs=False", "choose another backend")
