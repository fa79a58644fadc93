"""Loading a module so that it is warm: each of its kernels that a step can take is launched once on a tiny scene."""

from __future__ import annotations

from typing import NamedTuple

import torch

from freetoken_attention_flashinfer import library
from freetoken_attention_flashinfer.kernels import ASSUMED_MULTIPROCESSORS, FA2
from freetoken_attention_flashinfer.pages import page_index
from freetoken_attention_flashinfer.workspace import LARGE_TILE, MIDDLE_TILE, SMALL_TILE, Sizes

PAGE_TOKENS = 16
LONG_CONTEXT = 4096  # of one head: split, however small the card


class Scene(NamedTuple):
    query: int
    context: int


def scenes(kernel: str) -> tuple[Scene, ...]:
    """One query length for each tile, alone and over a context that is split; FA3 has one tile and splits nothing."""
    if kernel != FA2:
        return (Scene(LARGE_TILE, LARGE_TILE),)
    queries = (SMALL_TILE, MIDDLE_TILE, LARGE_TILE)
    return tuple(Scene(query, context) for query in queries for context in (query, LONG_CONTEXT))


def touch(kernel: str, dtype: str, head_dim: int, device: str) -> None:
    """Load a module into this process and launch what it holds. Keys are one page that all positions share."""
    target, kind = torch.device(device), getattr(torch, dtype)
    library.load_module(kernel, kind, head_dim)
    sizes = Sizes(1, 1, head_dim, _multiprocessors(target))
    floats = torch.empty(sizes.float_bytes(), dtype=torch.uint8, device=target)
    ints = torch.empty(sizes.int_bytes(LARGE_TILE, 1), dtype=torch.uint8, device=target)
    pool = torch.zeros(1, PAGE_TOKENS, 1, head_dim, dtype=kind, device=target)
    for query, context in scenes(kernel):
        index = page_index((query,), (context - query,), PAGE_TOKENS, context)
        wrapper = library.eager_wrapper(kernel, floats, ints)
        library.plan(
            wrapper, index, torch.zeros(index.num_pages, dtype=torch.int32, device=target), q_heads=1, kv_heads=1,
            head_dim=head_dim, page_tokens=PAGE_TOKENS, scale=1.0, dtype=kind, max_query=query,
        )  # fmt: skip
        q = torch.zeros(query, 1, head_dim, dtype=kind, device=target)
        library.run(wrapper, q, pool, pool, torch.empty_like(q), dependent=False)
    if target.type == "cuda":
        torch.cuda.synchronize(target)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return ASSUMED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
