"""The backend: plans that own their tensors, and a forward that launches what the launch space declares."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch
from attrs import frozen
from torch import Tensor

from freetoken.ops.triton_launch import BoundLaunch, bind
from freetoken.plugin.protocols import AttentionLimits, AttentionSetup, BatchPlan
from freetoken.vocab.batch import Batch
from freetoken.vocab.errors import EngineError
from freetoken.vocab.units import ceil_div
from freetoken_attention_triton.launches import Geometry, Splits, splits, step_launches
from freetoken_attention_triton.shape import attention_shape
from freetoken_attention_triton.workspace import part_rows

TABLE_MULTIPLE = 4  # entries; keeps the rows of a page table at multiples of 16 bytes


@frozen(eq=False)
class TritonPlan:
    """One step: its sizes, and tensors that nobody else writes.

    ``page_table [B, max pages] i32``, ``query_starts [B + 1] i32``, ``context_lens [B] i32``; ``partial`` and ``lse``
    hold the parts of split contexts while one layer runs.
    """

    tokens: int
    sequences: int
    parts: Splits
    page_table: Tensor
    query_starts: Tensor
    context_lens: Tensor
    partial: Tensor
    lse: Tensor


@frozen(eq=False)
class _GraphMemory:
    """What captured plans share; they are replayed one after another, each brought up to date right before."""

    page_table: Tensor
    query_starts: Tensor
    context_lens: Tensor
    partial: Tensor
    lse: Tensor


class TritonAttention:
    """Implements ``plugin.protocols.AttentionBackend`` for one group of layers."""

    def __init__(self, setup: AttentionSetup) -> None:
        group = setup.group
        self._scale = group.scale
        self._limits = setup.limits
        self._device = torch.device(setup.device.torch_name)
        self._dtype: torch.dtype = getattr(torch, setup.dtype)
        self._geometry = Geometry.of(attention_shape(setup), setup.device)
        self._graph: _GraphMemory | None = None
        # The layers of a step, and the replays of a batch size, share one set of bound launches.
        self._bound = lru_cache(maxsize=1024)(self._bind)

    def plan(self, batch: Batch) -> BatchPlan:
        """A ``TritonPlan``. Copies on the device alone; no host synchronisation."""
        return self._plan(batch, decode=batch.is_decode)

    def forward(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int, plan: BatchPlan) -> Tensor:
        """``q [T, Hq, D]``, pools ``[pages, P, Hkv, D]`` → ``[T, Hq, Dv]`` in q's dtype.

        Raises ``EngineError`` when q or the pools do not lie as the kernels address them.
        """
        step = cast(TritonPlan, plan)
        geometry = self._geometry
        if q.stride(1) != geometry.k_dim or q.stride(2) != 1:
            raise EngineError("Triton attention", f"q of strides {q.stride()}", "keep a token's heads side by side")
        if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
            raise EngineError("Triton attention", f"a pool of strides {k_pool.stride()}", "keep a layer's pool whole")
        out = torch.empty(step.tokens, geometry.q_heads, geometry.v_dim, dtype=q.dtype, device=q.device)
        stride = step.page_table.stride(0)
        calls = self._bound(step.tokens, step.sequences, step.parts, q.stride(0), stride)
        for name, call in calls:
            if name == "combine":
                call(step.partial, step.lse, out)
            elif name == "combine_decoded":
                call(step.partial, step.lse, out, step.query_starts, step.context_lens)
            else:
                call(
                    q, k_pool, v_pool, out, step.partial, step.lse,
                    step.page_table, step.query_starts, step.context_lens,
                )  # fmt: skip
        return out

    def reserve_graph(self, limits: AttentionLimits) -> None:
        """Allocate the buffers that captured plans read, for the largest batch and context."""
        most = limits.max_running_requests
        width = _table_width(ceil_div(limits.max_seq_tokens, limits.page_tokens))
        partial, lse = self._scratch(
            max(part_rows(self._geometry, n, n, limits.max_seq_tokens, True) for n in range(1, most + 1))
        )
        self._graph = _GraphMemory(
            page_table=torch.zeros(most, width, dtype=torch.int32, device=self._device),
            query_starts=torch.arange(most + 1, dtype=torch.int32, device=self._device),
            context_lens=torch.ones(most, dtype=torch.int32, device=self._device),
            partial=partial,
            lse=lse,
        )

    def plan_capture(self, batch: Batch) -> BatchPlan:
        """A plan over the shared buffers. Its grid follows the batch's size alone, so it serves any context."""
        memory = self._reserved()
        count = batch.num_sequences
        if batch.num_tokens != count:
            raise EngineError("a captured attention plan", "more than one token a sequence", "capture decode")
        plan = TritonPlan(
            tokens=count,
            sequences=count,
            parts=splits(self._geometry, count, count, self._limits.max_seq_tokens, True),
            page_table=memory.page_table[:count],
            query_starts=memory.query_starts[: count + 1],
            context_lens=memory.context_lens[:count],
            partial=memory.partial,
            lse=memory.lse,
        )
        self.plan_replay(plan, batch)
        return plan

    def plan_replay(self, plan: BatchPlan, batch: Batch) -> None:
        """Copy the batch's page table and lengths into the plan's buffers."""
        step = cast(TritonPlan, plan)
        if batch.num_sequences != step.sequences:
            raise EngineError(
                "a replay of a captured attention plan",
                f"{batch.num_sequences} sequences, captured for {step.sequences}",
                "pad the batch to the captured size",
            )
        step.page_table[:, : batch.page_table.shape[1]].copy_(batch.page_table)
        step.context_lens.copy_(batch.context_lens)

    def release_graph(self) -> None:
        self._graph = None

    def _reserved(self) -> _GraphMemory:
        if self._graph is None:
            raise EngineError("a captured attention plan", "nothing is reserved", "call reserve_graph first")
        return self._graph

    def _plan(self, batch: Batch, decode: bool) -> TritonPlan:
        tokens, sequences, context = batch.num_tokens, batch.num_sequences, batch.max_context_tokens
        width = _table_width(batch.page_table.shape[1])
        table = torch.empty(sequences, width, dtype=torch.int32, device=self._device)
        table[:, : batch.page_table.shape[1]].copy_(batch.page_table)
        partial, lse = self._scratch(part_rows(self._geometry, tokens, sequences, context, decode))
        return TritonPlan(
            tokens=tokens,
            sequences=sequences,
            parts=splits(self._geometry, tokens, sequences, context, decode),
            page_table=table,
            query_starts=batch.query_starts.clone(),
            context_lens=batch.context_lens.clone(),
            partial=partial,
            lse=lse,
        )

    def _scratch(self, rows: int) -> tuple[Tensor, Tensor]:
        """``partial [rows, Hq, Dv] f32`` and ``lse [rows, Hq] f32``; ``rows`` counts tokens × parts."""
        geometry = self._geometry
        partial = torch.empty(rows, geometry.q_heads, geometry.v_dim, dtype=torch.float32, device=self._device)
        return partial, torch.empty(rows, geometry.q_heads, dtype=torch.float32, device=self._device)

    def _bind(
        self, tokens: int, sequences: int, parts: Splits, q_stride: int, table_stride: int
    ) -> tuple[tuple[str, BoundLaunch], ...]:
        made = step_launches(self._geometry, tokens, sequences, parts, q_stride, table_stride, self._scale)
        return tuple((launch.kernel.rpartition(":")[2], bind(launch)) for launch in made)


def _table_width(pages: int) -> int:
    return ceil_div(pages, TABLE_MULTIPLE) * TABLE_MULTIPLE


def create(setup: AttentionSetup) -> TritonAttention:
    """The factory that ``spec`` names."""
    return TritonAttention(setup)
