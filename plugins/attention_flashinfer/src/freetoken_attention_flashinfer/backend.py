"""The backend: a wrapper of the library for each live plan, over the core's pools and page tables."""

from __future__ import annotations

from typing import Any, cast

import torch
from attrs import define, frozen
from torch import Tensor

from freetoken.ops.dependent_launch import dependent_launches
from freetoken.plugin.protocols import AttentionLimits, AttentionSetup, BatchPlan
from freetoken.vocab.batch import Batch
from freetoken.vocab.errors import EngineError
from freetoken.vocab.units import ceil_div
from freetoken_attention_flashinfer import library
from freetoken_attention_flashinfer.kernels import FA2, kernels_for, step_kernel
from freetoken_attention_flashinfer.leases import Lease, LeasePool, make_fence
from freetoken_attention_flashinfer.pages import PageIndex, page_index
from freetoken_attention_flashinfer.workspace import RING, Sizes, most_tokens, shared_float_bytes


@frozen(eq=False)
class EagerPlan:
    """One step of ``tokens``: a wrapper that no other plan touches while this one lives."""

    tokens: int
    wrapper: Any


@define(eq=False)
class CapturedPlan:
    """Decode of ``tokens`` sequences in a graph. The wrappers of ``ring`` share every address on the device, so that
    whichever was planned last, the graph reads its plan."""

    tokens: int
    ring: tuple[Lease, ...]
    planned: int = 0

    @property
    def wrapper(self) -> Any:
        return self.ring[self.planned].wrapper

    def turn(self) -> Lease:
        """The next wrapper, once the device has read what it was planned for before."""
        self.planned = (self.planned + 1) % len(self.ring)
        lease = self.ring[self.planned]
        lease.fence.wait()
        return lease


@frozen(eq=False)
class _GraphMemory:
    """What captured plans share; they are replayed one after another, each brought up to date right before.

    ``page_ids [B · max pages] i32``, ``query_starts`` and ``page_starts [B + 1] i32``, ``last_page_tokens [B] i32``;
    ``ints`` is the library's own, in bytes.
    """

    page_ids: Tensor
    query_starts: Tensor
    page_starts: Tensor
    last_page_tokens: Tensor
    ints: Tensor


class FlashInferAttention:
    """Implements ``plugin.protocols.AttentionBackend`` for one group of layers.

    Prefill, extend and decode go through one kind of wrapper: the library's decode on tensor cores is the same kernel.
    """

    def __init__(self, setup: AttentionSetup) -> None:
        group, cache = setup.group, setup.group.cache
        if cache.k_dim != cache.v_dim:
            raise EngineError(
                "FlashInfer attention", f"keys of {cache.k_dim} and values of {cache.v_dim}",
                "serve with --attention-backend triton",
            )  # fmt: skip
        self._scale = group.scale
        self._limits = setup.limits
        self._device = torch.device(setup.device.torch_name)
        self._dtype: torch.dtype = getattr(torch, setup.dtype)
        self._sizes = Sizes.of(setup)
        self._kernels = kernels_for(setup.device.arch)
        self._dependent = dependent_launches(setup.device)
        # A step's parts are written and joined within one forward, and forwards run one after another on one stream.
        self._floats = self._bytes(shared_float_bytes(self._sizes, setup.limits))
        # Every pooled plan has room for any step within the limits: a chunk of a prompt beside every running request.
        limits = setup.limits
        self._int_bytes = self._sizes.int_bytes(most_tokens(limits), limits.max_running_requests)
        self._pools = {kernel: self._lease_pool(kernel) for kernel in self._kernels}
        self._graph: _GraphMemory | None = None

    def plan(self, batch: Batch) -> BatchPlan:
        """An ``EagerPlan``. Index arrays are made from host integers; nothing waits for the device."""
        index = self._index(batch)
        sizes = self._sizes
        kernel = step_kernel(self._kernels, batch.query_lens, sizes.q_heads, sizes.multiprocessors)
        needed = sizes.int_bytes(batch.num_tokens, batch.num_sequences)
        pool = self._pools[kernel]
        lease = pool.take() if needed <= self._int_bytes else self._lease(kernel, needed)
        self._plan(lease, index, self._page_ids(batch, index), batch)
        plan = EagerPlan(batch.num_tokens, lease.wrapper)
        pool.lend(lease, plan)
        return plan

    def forward(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int, plan: BatchPlan) -> Tensor:
        """``q [T, Hq, D]``, pools ``[pages, P, Hkv, D]`` → ``[T, Hq, D]`` in q's dtype.

        Raises ``EngineError`` when q or the pools do not lie as the library reads them.
        """
        step = cast(EagerPlan | CapturedPlan, plan)
        if q.stride(1) != self._sizes.head_dim or q.stride(2) != 1:
            raise EngineError("FlashInfer attention", f"q of strides {q.stride()}", "keep a token's heads side by side")
        if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
            raise EngineError(
                "FlashInfer attention", f"a pool of strides {k_pool.stride()}", "keep a layer's pool whole"
            )
        out = torch.empty(step.tokens, self._sizes.q_heads, self._sizes.head_dim, dtype=q.dtype, device=q.device)
        library.run(step.wrapper, q, k_pool, v_pool, out, self._dependent)
        return out

    def reserve_graph(self, limits: AttentionLimits) -> None:
        """Allocate the buffers that captured plans read, for the largest batch and context."""
        most = limits.max_running_requests
        needed = self._sizes.captured_float_bytes(most)
        if needed > self._floats.numel():
            raise EngineError(
                "captured FlashInfer plans", f"{most} sequences need {needed} bytes, made for {self._floats.numel()}",
                "reserve for the limits that the backend was made with",
            )  # fmt: skip
        self._graph = _GraphMemory(
            page_ids=self._zeros(most * ceil_div(limits.max_seq_tokens, limits.page_tokens)),
            query_starts=self._zeros(most + 1),
            page_starts=self._zeros(most + 1),
            last_page_tokens=self._zeros(most),
            ints=self._bytes(self._sizes.captured_int_bytes(most)),
        )

    def plan_capture(self, batch: Batch) -> BatchPlan:
        """A plan over the shared buffers; its launches follow the batch's size alone, so it serves any context."""
        memory = self._reserved()
        count = batch.num_sequences
        if batch.num_tokens != count:
            raise EngineError("a captured attention plan", "more than one token a sequence", "capture decode")
        plan = CapturedPlan(count, tuple(self._graph_lease(memory, count) for _ in range(RING)))
        for _ in plan.ring:  # each plans once, so that none meets anything for the first time in a replay
            self.plan_replay(plan, batch)
        return plan

    def plan_replay(self, plan: BatchPlan, batch: Batch) -> None:
        """Plan the batch into the buffers that the graph reads."""
        step, memory = cast(CapturedPlan, plan), self._reserved()
        if batch.num_sequences != step.tokens:
            raise EngineError(
                "a replay of a captured attention plan",
                f"{batch.num_sequences} sequences, captured for {step.tokens}",
                "pad the batch to the captured size",
            )
        index = self._index(batch)
        if index.num_pages > memory.page_ids.numel():
            raise EngineError(
                "a replay of a captured attention plan",
                f"{index.num_pages} pages, reserved for {memory.page_ids.numel()}",
                "reserve for longer contexts",
            )
        ids = self._page_ids(batch, index, memory.page_ids[: index.num_pages])
        self._plan(step.turn(), index, ids, batch)

    def release_graph(self) -> None:
        self._graph = None

    # ------------------------------------------------------------------------------------------------ planning

    def _index(self, batch: Batch) -> PageIndex:
        return page_index(batch.query_lens, batch.prefix_lens, self._limits.page_tokens, int(batch.page_table.shape[1]))

    def _page_ids(self, batch: Batch, index: PageIndex, out: Tensor | None = None) -> Tensor:
        """``[pages] i32`` on the device: the page table without its padding. The host knows their number already."""
        host = library.pinned(self._device, index.num_pages)
        host.numpy()[:] = index.table_entries
        entries = host.to(self._device, non_blocking=True)
        return torch.index_select(batch.page_table.reshape(-1), 0, entries, out=out)

    def _plan(self, lease: Lease, index: PageIndex, page_ids: Tensor, batch: Batch) -> None:
        sizes = self._sizes
        library.plan(
            lease.wrapper, index, page_ids, q_heads=sizes.q_heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim,
            page_tokens=self._limits.page_tokens, scale=self._scale, dtype=self._dtype,
            max_query=batch.max_query_tokens,
        )  # fmt: skip
        lease.fence.set()

    # ------------------------------------------------------------------------------------------------ memory

    def _lease_pool(self, kernel: str) -> LeasePool:
        return LeasePool(lambda: self._lease(kernel, self._int_bytes))

    def _lease(self, kernel: str, int_bytes: int) -> Lease:
        wrapper = library.eager_wrapper(kernel, self._floats, self._bytes(int_bytes))
        return Lease(wrapper, make_fence(self._device))

    def _graph_lease(self, memory: _GraphMemory, count: int) -> Lease:
        wrapper = library.graph_wrapper(
            FA2, self._floats, memory.ints, query_starts=memory.query_starts[: count + 1],
            page_starts=memory.page_starts[: count + 1], page_ids=memory.page_ids,
            last_page_tokens=memory.last_page_tokens[:count],
        )  # fmt: skip
        return Lease(wrapper, make_fence(self._device))

    def _reserved(self) -> _GraphMemory:
        if self._graph is None:
            raise EngineError("a captured attention plan", "nothing is reserved", "call reserve_graph first")
        return self._graph

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)


def create(setup: AttentionSetup) -> FlashInferAttention:
    """The factory that ``spec`` names."""
    return FlashInferAttention(setup)
