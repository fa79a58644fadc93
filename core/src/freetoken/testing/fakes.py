"""Small stand-ins for what the engine hands to plugins: devices, ragged batches, stored tensors."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.vocab.batch import Batch
from freetoken.vocab.hardware import Device
from freetoken.vocab.units import ceil_div
from freetoken.vocab.weight import StoredTensor

PLAIN_FORMATS = ("float32", "bfloat16", "float16")


def load_specs(target: str) -> tuple[Any, ...]:
    """What ``"module:NAME"`` names: a spec, several, or a hook implementation that returns some."""
    module, _, name = target.partition(":")
    value = getattr(importlib.import_module(module), name)
    if callable(value):
        value = value()
    return tuple(value) if isinstance(value, Iterable) else (value,)


def device_kinds(declared: Iterable[str]) -> tuple[str, ...]:
    """The kinds of device to test on: those declared, or the CPU while Triton's interpreter stands in for a GPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ("cpu",)
    return tuple(sorted(declared))


def device_marks(kind: str) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a test that needs a device of ``kind``."""
    if kind == "cpu":
        return ()
    return (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


def make_device(kind: str) -> Device:
    """The device of ``kind`` as a probe would describe it."""
    if kind == "cpu":
        return Device()
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return Device(
        kind="cuda",
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_memory_bytes=getattr(properties, "shared_memory_per_block_optin", 0),
        memory_total_bytes=total,
        memory_free_bytes=free,
    )


def pages_needed(query_lens: Sequence[int], prefix_lens: Sequence[int], page_tokens: int) -> int:
    """Pages that hold every token of a batch."""
    return sum(ceil_div(q + p, page_tokens) for q, p in zip(query_lens, prefix_lens, strict=True))


def make_batch(
    query_lens: Sequence[int],
    prefix_lens: Sequence[int],
    page_tokens: int = 16,
    *,
    device: str = "cpu",
    num_pages: int | None = None,
    contiguous: bool = False,
    vocab_size: int = 100,
    seed: int = 0,
) -> Batch:
    """A ragged batch whose page ids are drawn from ``1 … num_pages − 1``, without order unless ``contiguous``.

    Page 0 is nobody's, so that an unused entry of the page table points at a page that a test may poison. Token ids and
    pages depend on ``seed`` alone.
    """
    generator = torch.Generator().manual_seed(seed)
    contexts = [q + p for q, p in zip(query_lens, prefix_lens, strict=True)]
    counts = [ceil_div(c, page_tokens) for c in contexts]
    total = num_pages if num_pages is not None else sum(counts) + 1
    assert total > sum(counts), f"{sum(counts)} pages and the unused page 0 do not fit in {total}"
    ids = torch.arange(1, total) if contiguous else torch.randperm(total - 1, generator=generator) + 1
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = ids[start : start + count]
        start += count
    positions = torch.cat([torch.arange(p, c) for p, c in zip(prefix_lens, contexts, strict=True)])
    sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(query_lens))
    starts = [0, *accumulate(query_lens)]
    tokens = torch.randint(0, vocab_size, (starts[-1],), generator=generator)
    slots = table[sequence, positions // page_tokens].long() * page_tokens + positions % page_tokens
    return Batch(
        query_lens=tuple(query_lens),
        prefix_lens=tuple(prefix_lens),
        tokens=tokens.to(device),
        positions=positions.to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        page_table=table.to(device),
        kv_slots=slots.to(device),
        state_slots=torch.arange(len(counts), device=device),
        logit_rows=(torch.tensor(starts[1:]) - 1).to(device),
    )


def sequence_slots(batch: Batch, sequence: int, page_tokens: int) -> Tensor:
    """The pool rows of all context tokens of one sequence, in order, ``[context] i64``."""
    positions = torch.arange(int(batch.context_lens[sequence]), device=batch.page_table.device)
    return batch.page_table[sequence, positions // page_tokens].long() * page_tokens + positions % page_tokens


def stored(data: Tensor, name: str = "weight") -> StoredTensor:
    """A tensor in its plain format, as a checkpoint would yield it."""
    return StoredTensor(name, str(data.dtype).removeprefix("torch."), tuple(data.shape), {"data": data}, "memory")


def dequantise_plain(tensor: StoredTensor) -> Tensor:
    """The reference dequantisation of the plain formats, which may return a view of what was stored."""
    return tensor.parts["data"].float()


Randn = Callable[..., Tensor]


def normal(seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Randn:
    """``randn(*shape)`` from a generator of its own: the same numbers on every device, rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    return randn
