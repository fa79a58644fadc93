"""Index arithmetic: from host integers to the arrays that FlashInfer wants. Pure; numpy alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from freetoken.vocab.errors import EngineError


@frozen(eq=False)
class PageIndex:
    """One step's pages, sequence after sequence, without the padding of a page table.

    ``query_starts [B + 1]`` and ``page_starts [B + 1]`` are offsets, ``last_page_tokens [B]`` says how much of each
    sequence's last page is used (1 to P), ``context_lens [B]`` how long it is, ``table_entries [pages]`` which entries
    of the flattened page table ``[B · width]`` hold the page ids. All int32.
    """

    query_starts: np.ndarray
    page_starts: np.ndarray
    last_page_tokens: np.ndarray
    context_lens: np.ndarray
    table_entries: np.ndarray

    @property
    def num_pages(self) -> int:
        return len(self.table_entries)


def page_index(query_lens: Sequence[int], prefix_lens: Sequence[int], page_tokens: int, table_width: int) -> PageIndex:
    """The index of a batch whose page table has ``table_width`` columns.

    Raises ``EngineError`` where a sequence has more pages than that.
    """
    queries = np.asarray(query_lens, dtype=np.int64)
    contexts = queries + np.asarray(prefix_lens, dtype=np.int64)
    pages = (contexts + page_tokens - 1) // page_tokens
    if int(pages.max()) > table_width:
        raise EngineError(
            "a step of FlashInfer attention", f"{int(pages.max())} pages in a page table of {table_width} columns",
            "this is a bug; please report it",
        )  # fmt: skip
    page_starts = _starts(pages)
    # Entry i belongs to sequence b and is its page i − page_starts[b]; it lies that far into row b of the table.
    shifts = np.arange(len(pages), dtype=np.int32) * np.int32(table_width) - page_starts[:-1]
    entries = np.arange(int(page_starts[-1]), dtype=np.int32) + np.repeat(shifts, pages)
    last = contexts - (pages - 1) * page_tokens
    return PageIndex(_starts(queries), page_starts, last.astype(np.int32), contexts.astype(np.int32), entries)


def _starts(lengths: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts
