"""A stand-in for the library, written from its documentation: what a wrapper computes, and what its plans need."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

MULTIPROCESSORS = 132


def up(value: int, step: int) -> int:
    return -(-value // step)


def needed_bytes(
    query_lens: list[int], pages: list[int], q_heads: int, kv_heads: int, dim: int, page: int, *, graph: bool
) -> tuple[int, int]:
    """(float, int) workspace bytes of a plan of the library's FA2 kernels, worked out from what its planner does.

    Rows are queries × heads of a group. Contexts are cut into chunks of whole pages, the shortest that give at most two
    parts for each multiprocessor and key head; in a graph the arrays have the length that any replay may need.
    """
    share, count = q_heads // kv_heads, len(query_lens)
    rows = [n * share for n in query_lens]
    average = (sum(query_lens) - count + 1) * share if graph else sum(rows) // count
    tile = 16 if average <= 16 else 64 if average <= 64 or dim >= 256 else 128
    tiles = [up(n, tile) for n in rows]
    most = 2 * MULTIPROCESSORS // kv_heads
    low, high = max(128 // page, 1), max(pages)
    while low < high:
        middle = (low + high) // 2
        if sum(t * up(p, middle) for t, p in zip(tiles, pages, strict=True)) > most:
            low = middle + 1
        else:
            high = middle
    split = graph or low < max(pages)
    parts = sum(t * up(p, low) for t, p in zip(tiles, pages, strict=True))
    if graph:
        worst = up(sum(query_lens) * share, tile) + count - 1
        assert parts <= max(most, worst)
        parts = max(most, worst)

    def padded(size: int) -> int:
        return up(size, 16) * 16

    ints = 3 * padded(4 * parts) + padded(4 * (count + 1)) + padded(4) + (padded(4) if graph else 0)
    floats = 0
    if split:
        ints += padded(4 * (sum(query_lens) + 1)) + padded(parts)
        floats = padded(4 * q_heads * parts * tile * dim) + padded(4 * q_heads * parts * tile)
    return floats, ints


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` on plain tensors. Every instance is listed in ``made``."""

    made: list["Wrapper"] = []

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None, paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None, paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD"
        self.backend, self.graph = backend, use_cuda_graph
        self.floats = float_workspace_buffer
        self.ints = torch.empty(0, dtype=torch.uint8)
        self.buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self.plans = 0
        Wrapper.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self.floats, self.ints = float_workspace_buffer, int_workspace_buffer

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        q_data_type: torch.dtype, kv_data_type: torch.dtype, max_token_per_sequence: int,
        seq_lens: Tensor,
    ) -> None:  # fmt: skip
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(t.dtype == torch.int32 for t in given)
        assert causal
        assert q_data_type == kv_data_type
        queries = (qo_indptr[1:] - qo_indptr[:-1]).tolist()
        pages = (paged_kv_indptr[1:] - paged_kv_indptr[:-1]).tolist()
        lengths = (torch.tensor(pages) - 1) * page_size + paged_kv_last_page_len
        assert torch.equal(seq_lens, lengths.int())
        assert max(queries) == max_token_per_sequence
        assert len(paged_kv_indices) == sum(pages)
        floats, ints = needed_bytes(
            queries, pages, num_qo_heads, num_kv_heads, head_dim_qk, page_size, graph=self.graph
        )
        assert floats <= self.floats.numel(), "the library would say: buffer overflow in the float workspace"
        assert ints <= self.ints.numel(), "the library would say: buffer overflow in the int workspace"
        if self.graph:
            assert self.buffers[0] is not None
            assert len(queries) == len(self.buffers[0]) - 1
            for buffer, new in zip(self.buffers, given, strict=True):
                assert buffer is not None
                buffer[: len(new)].copy_(new)
        else:
            self.buffers = given
        self.page, self.scale, self.rows = page_size, sm_scale, sum(queries)
        self.plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor, enable_pdl: bool) -> Tensor:
        starts, page_starts, ids, last = (buffer for buffer in self.buffers if buffer is not None)
        self.dependent = enable_pdl
        assert q.shape[0] == self.rows == out.shape[0]
        k_pool, v_pool = paged_kv_cache
        assert k_pool.shape[1] == self.page
        for b in range(len(last)):
            pages = ids[page_starts[b] : page_starts[b + 1]].long()
            length = (len(pages) - 1) * self.page + int(last[b])
            k = k_pool[pages].flatten(0, 1)[:length].float()
            v = v_pool[pages].flatten(0, 1)[:length].float()
            rows = q[starts[b] : starts[b + 1]].float().unflatten(1, (k.shape[1], -1))
            scores = torch.einsum("qhgd,khd->hgqk", rows, k) * self.scale
            hidden = torch.ones(rows.shape[0], length, dtype=torch.bool).triu(length - rows.shape[0] + 1)
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
            mixed = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
            out[starts[b] : starts[b + 1]] = mixed.to(out.dtype)
        return out


class JitSpec:
    """A module of the library: a name, and whether it came prebuilt."""

    built: list[tuple[object, ...]] = []

    def __init__(self, kernel: str, *facts: object, is_aot: bool = False) -> None:
        self.kernel, self.facts, self.is_aot = kernel, facts, is_aot

    def build(self, *, need_lock: bool) -> None:
        assert need_lock, "the library's own loading takes the same lock"
        JitSpec.built.append((self.kernel, *self.facts))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in under the library's name; ``loaded`` lists the modules that were asked for."""
    names = ("flashinfer", "flashinfer.prefill", "flashinfer.jit", "flashinfer.jit.attention")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    root = modules["flashinfer"]
    root.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    root.loaded = []
    modules["flashinfer.prefill"].get_batch_prefill_module = lambda *facts: root.loaded.append(facts)
    modules["flashinfer.jit.attention"].gen_batch_prefill_module = JitSpec
    monkeypatch.setattr(Wrapper, "made", [])
    monkeypatch.setattr(JitSpec, "built", [])
    root.Wrapper, root.JitSpec, root.needed_bytes = Wrapper, JitSpec, needed_bytes
    return root


@pytest.fixture(scope="session")
def needed() -> Any:
    """What the library asks for, for tests of the claims."""
    return needed_bytes
