"""The fixed buffers a captured decode step reads: one copy from the host brings all of them up to date.

Layout in one byte buffer, each column ``[size]`` and aligned to 16 bytes: 64-bit columns first, then 32-bit ones. The
page table lies apart, since it changes only when a batch's composition or a page does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freetoken.run.batch_builder import PageTables
from freetoken.run.step_plan import SamplingRow, StepRow
from freetoken.vocab.batch import Batch

_LONG = ("tokens", "positions", "kv_slots", "state_slots", "lanes", "seeds", "steps", "pending")
_INT = ("context_lens", "top_k")
_FLOAT = ("temperature", "top_p", "min_p")
_ALIGN = 16
_RING = 4  # replays whose host buffers may still be read


def _column_bytes(size: int, item: int) -> int:
    return -(-size * item // _ALIGN) * _ALIGN


class DecodeInputs:
    """Buffers for one captured size. ``scratch_lane`` is where padded rows leave their token."""

    def __init__(self, size: int, max_pages: int, page_tokens: int, scratch_lane: int, device: torch.device) -> None:
        self.size = size
        self._page = page_tokens
        self._scratch_lane = scratch_lane
        offsets, total = {}, 0
        for name in (*_LONG, *_INT, *_FLOAT):
            offsets[name] = total
            total += _column_bytes(size, 8 if name in _LONG else 4)
        pin = device.type == "cuda"
        self._hosts = [torch.zeros(total, dtype=torch.uint8, pin_memory=pin) for _ in range(_RING)]
        self._next = 0
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._offsets = offsets
        self._table_host = torch.zeros(size, max_pages, dtype=torch.int32, pin_memory=pin)
        self.page_table = torch.zeros(size, max_pages, dtype=torch.int32, device=device)
        self._table_of: tuple[tuple[int, int, int], ...] = ()
        self._table_pages: list[Sequence[int]] = []  # held, so that no other list gets an id in `_table_of`
        self._starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(size, dtype=torch.int64, device=device)
        self._numpy = [{n: self._numpy_column(h, n) for n in offsets} for h in self._hosts]

    def _numpy_column(self, host: Tensor, name: str) -> np.ndarray:
        dtype = np.int64 if name in _LONG else np.int32 if name in _INT else np.float32
        start = self._offsets[name]
        column: np.ndarray = host.numpy()[start : start + self.size * np.dtype(dtype).itemsize].view(dtype)
        return column

    def column(self, name: str) -> Tensor:
        """The device's view of one column, ``[size]``, at an address that never changes."""
        dtype = torch.int64 if name in _LONG else torch.int32 if name in _INT else torch.float32
        start = self._offsets[name]
        return self._device[start : start + self.size * dtype.itemsize].view(dtype)

    def batch(self, tokens: Tensor, prefix_lens: Sequence[int]) -> Batch:
        """The batch over the fixed buffers; ``tokens [size]`` come from the caller, pending ones resolved."""
        return Batch(
            query_lens=(1,) * self.size,
            prefix_lens=tuple(prefix_lens),
            tokens=tokens,
            positions=self.column("positions"),
            query_starts=self._starts,
            context_lens=self.column("context_lens"),
            page_table=self.page_table,
            kv_slots=self.column("kv_slots"),
            state_slots=self.column("state_slots"),
            logit_rows=self._rows,
        )

    def fill(self, rows: Sequence[StepRow], tables: PageTables) -> tuple[int, ...]:
        """Send ``rows`` (padded to ``size``) to the device; returns every row's prefix, padding's being 0."""
        host, columns = self._hosts[self._next], self._numpy[self._next]
        self._next = (self._next + 1) % _RING
        count, page = len(rows), self._page
        prefixes = [row.prefix_tokens for row in rows]
        samples = [row.sample for row in rows]
        _put(columns["tokens"], [row.tokens[0] for row in rows], 0)
        _put(columns["positions"], prefixes, 0)
        slots = [row.pages[p // page] * page + p % page for row, p in zip(rows, prefixes, strict=True)]
        _put(columns["kv_slots"], slots, 0)
        _put(columns["state_slots"], [row.state_slot for row in rows], 0)
        _put(columns["lanes"], [row.lane for row in rows], self._scratch_lane)
        _put(columns["pending"], [int(row.pending) for row in rows], 0)
        _put(columns["context_lens"], [p + 1 for p in prefixes], 1)
        self._put_sampling(columns, [s for s in samples if s is not None])
        self._device.copy_(host, non_blocking=True)
        self._send_tables(rows, tables)
        return (*prefixes, *([0] * (self.size - count)))

    def _put_sampling(self, columns: dict[str, np.ndarray], samples: Sequence[SamplingRow]) -> None:
        _put(columns["seeds"], [s.seed for s in samples], 0)
        _put(columns["steps"], [s.step for s in samples], 0)
        _put(columns["temperature"], [s.params.temperature for s in samples], 0.0)
        _put(columns["top_k"], [s.params.top_k for s in samples], 0)
        _put(columns["top_p"], [s.params.top_p for s in samples], 1.0)
        _put(columns["min_p"], [s.params.min_p for s in samples], 0.0)

    def _send_tables(self, rows: Sequence[StepRow], tables: PageTables) -> None:
        """Copy the page table only when a row's list of pages, its version or its length changed."""
        signature = tuple((id(row.pages), row.pages_version, len(row.pages)) for row in rows)
        if signature == self._table_of:
            return
        self._table_of = signature
        self._table_pages = [row.pages for row in rows]
        # A fresh buffer: the last one may still be on its way to the device.
        table = torch.zeros_like(self._table_host, pin_memory=self._table_host.is_pinned())
        target = table.numpy()
        for index, row in enumerate(rows):
            target[index] = tables.row(row)[: target.shape[1]]
        self.page_table.copy_(table, non_blocking=True)
        self._table_host = table


def _put(column: np.ndarray, values: Sequence[float], padding: float) -> None:
    count = len(values)
    column[:count] = values
    column[count:] = padding
