"""Turns a step's rows into the batch the model sees. The only writer of ``Batch``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from freetoken.run.staging import Staging
from freetoken.run.step_plan import StepPlan, StepRow
from freetoken.vocab.batch import Batch
from freetoken.vocab.units import ceil_div


class PageTables:
    """Each lane's page ids as a row of one array.

    A list of pages only grows, unless its version changes. A request that was preempted comes back with another list.
    """

    def __init__(self, lanes: int, max_pages: int) -> None:
        self._table = np.zeros((lanes, max_pages), dtype=np.int32)
        self._owner: list[tuple[Sequence[int] | None, int]] = [(None, 0)] * lanes  # the list itself, and its version
        self._filled = [0] * lanes

    def row(self, row: StepRow) -> np.ndarray:
        """The page ids of ``row``, brought up to date: ``[max pages] int32``, unused entries 0."""
        lane, pages = row.lane, row.pages
        table: np.ndarray = self._table[lane]
        held, version = self._owner[lane]
        if held is not pages or version != row.pages_version:
            self._owner[lane] = (pages, row.pages_version)
            table[: self._filled[lane]] = 0
            self._filled[lane] = 0
        filled = self._filled[lane]
        if filled < len(pages):
            table[filled : len(pages)] = pages[filled:]
            self._filled[lane] = len(pages)
        return table

    def gather(self, rows: Sequence[StepRow], width: int) -> np.ndarray:
        """The first ``width`` page ids of every row, brought up to date: ``[rows, width] int32``, a copy."""
        for row in rows:
            self.row(row)
        gathered: np.ndarray = self._table[[row.lane for row in rows], :width]
        return gathered


class BatchBuilder:
    """Builds batches for up to ``lanes`` sequences of up to ``max_seq_tokens``."""

    def __init__(
        self, device: torch.device, lanes: int, max_seq_tokens: int, max_tokens: int, page_tokens: int
    ) -> None:
        self.max_pages = ceil_div(max_seq_tokens, page_tokens)
        self.tables = PageTables(lanes, self.max_pages)
        self._page = page_tokens
        int_bytes = 8 * (3 * max_tokens + 6 * lanes) + 4 * lanes * (self.max_pages + 4) + 1024
        self._staging = Staging(device, int_bytes)

    def build(self, plan: StepPlan, last_tokens: torch.Tensor) -> Batch:
        """The batch of ``plan``; pending rows take their token from ``last_tokens [lanes]`` on the device."""
        rows = plan.rows
        page = self._page
        query_lens = tuple([len(row.tokens) for row in rows])
        prefix_lens = tuple([row.prefix_tokens for row in rows])
        queries, prefixes = np.array(query_lens, dtype=np.int64), np.array(prefix_lens, dtype=np.int64)
        query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(queries, out=query_starts[1:])
        context = prefixes + queries
        tables = self.tables.gather(rows, max(1, ceil_div(int(context.max()), page)))
        owner = np.arange(len(rows))
        if int(query_starts[-1]) == len(rows):  # one token each: what most steps are
            positions = prefixes
            tokens = np.array([row.tokens[0] for row in rows], dtype=np.int64)
        else:
            owner = np.repeat(owner, queries)
            positions = np.arange(len(owner), dtype=np.int64) + (prefixes - query_starts[:-1])[owner]
            tokens = np.concatenate([np.array(row.tokens, dtype=np.int64) for row in rows])
        slots = tables[owner, positions // page].astype(np.int64) * page + positions % page
        ends = query_starts[1:].astype(np.int64) - 1
        sampled = [i for i, row in enumerate(rows) if row.sample is not None]
        arrays = {
            "tokens": tokens,
            "positions": positions,
            "kv_slots": slots,
            "state_slots": np.array([row.state_slot for row in rows], dtype=np.int64),
            "logit_rows": ends if len(sampled) == len(rows) else ends[sampled],
            "query_starts": query_starts,
            "context_lens": context.astype(np.int32),
            "page_table": tables,
        }
        pending = [i for i, row in enumerate(rows) if row.pending]
        if pending:
            arrays["pending_at"] = ends[pending]
            arrays["pending_lanes"] = np.array([rows[i].lane for i in pending], dtype=np.int64)
        sent = self._staging.send(arrays)
        if pending:
            sent["tokens"].index_copy_(0, sent.pop("pending_at"), last_tokens[sent.pop("pending_lanes")])
        return Batch(query_lens=query_lens, prefix_lens=prefix_lens, **sent)
