"""The only file that speaks to FlashInfer. Written against 0.6.18; imports torch and the library.

Layout: its ``NHD`` is the core's ``[pages, P, Hkv, D]``, K and V apart, so that pools are handed over as they are.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freetoken_attention_flashinfer.pages import PageIndex

LAYOUT = "NHD"


def _find_ninja() -> None:
    """Let the library find the ``ninja`` that pip put beside this interpreter, in an environment nobody activated."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja") is None and (beside / "ninja").exists():
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), str(beside)))


_find_ninja()


def module_facts(dtype: torch.dtype, head_dim: int) -> tuple[object, ...]:
    """What tells modules apart, in the library's order: dtypes of q, KV, output and indices, both head sizes, then
    position encoding, window, soft cap and half-precision scores, none of which the core asks an attention for."""
    return (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False)


def build_module(kernel: str, dtype: str, head_dim: int) -> None:
    """Compile a module into the library's own cache, unless a prebuilt one is installed."""
    from flashinfer.jit.attention import gen_batch_prefill_module

    made = gen_batch_prefill_module(kernel, *module_facts(getattr(torch, dtype), head_dim))
    if not made.is_aot:
        made.build(need_lock=True)


def load_module(kernel: str, dtype: torch.dtype, head_dim: int) -> None:
    """Load a module into this process, where every wrapper finds it; builds it first if need be."""
    from flashinfer.prefill import get_batch_prefill_module

    get_batch_prefill_module(kernel, *module_facts(dtype, head_dim))


def eager_wrapper(kernel: str, floats: Tensor, ints: Tensor) -> Any:
    """A wrapper for one plan at a time. ``floats`` and ``ints`` are its workspaces, bytes on the device."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrapper = BatchPrefillWithPagedKVCacheWrapper(floats, LAYOUT, backend=kernel)
    wrapper.reset_workspace_buffer(floats, ints)  # it makes 8 MiB of its own otherwise
    return wrapper


def graph_wrapper(
    kernel: str, floats: Tensor, ints: Tensor, *, query_starts: Tensor, page_starts: Tensor, page_ids: Tensor,
    last_page_tokens: Tensor,
) -> Any:  # fmt: skip
    """A wrapper whose plans lie in the given buffers, for one number of sequences."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        floats, LAYOUT, use_cuda_graph=True, qo_indptr_buf=query_starts, paged_kv_indptr_buf=page_starts,
        paged_kv_indices_buf=page_ids, paged_kv_last_page_len_buf=last_page_tokens, backend=kernel,
    )  # fmt: skip
    wrapper.reset_workspace_buffer(floats, ints)
    return wrapper


def plan(
    wrapper: Any, index: PageIndex, page_ids: Tensor, *, q_heads: int, kv_heads: int, head_dim: int, page_tokens: int,
    scale: float, dtype: torch.dtype, max_query: int,
) -> None:  # fmt: skip
    """Plan a step: ``index`` stays on the host, ``page_ids [pages] i32`` are on the device. Nothing waits for it."""
    arrays = (index.query_starts, index.page_starts, index.last_page_tokens, index.context_lens)
    packed = pinned(page_ids.device, sum(map(len, arrays)))
    np.concatenate(arrays, out=packed.numpy())
    parts = packed.split([len(array) for array in arrays])  # type: ignore[no-untyped-call]
    query_starts, page_starts, last_page_tokens, context_lens = parts
    wrapper.plan(
        query_starts, page_starts, page_ids, last_page_tokens, q_heads, kv_heads, head_dim, page_tokens, causal=True,
        sm_scale=scale, q_data_type=dtype, kv_data_type=dtype, max_token_per_sequence=max_query, seq_lens=context_lens,
    )  # fmt: skip


def run(wrapper: Any, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, dependent: bool) -> None:
    """``q [T, Hq, D]`` over the pools of one layer into ``out [T, Hq, D]``, by the wrapper's newest plan.

    ``dependent`` lets kernels start before their predecessor has ended. The library's keep the rules of
    ``freetoken.ops.dependent_launch``, but for their plan's arrays, which they read before they wait: those are on the
    device before a step's first kernel, and a predecessor has waited for all that is older than itself.
    """
    wrapper.run(q, (k_pool, v_pool), out=out, enable_pdl=dependent)


def pinned(device: torch.device, count: int) -> Tensor:
    """``[count] i32`` on the host, from where a copy to ``device`` needs nobody to wait."""
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")
