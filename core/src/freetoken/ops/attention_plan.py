"""What paged attention in torch decides once a step, for all layers of a group: which rows, keys and masks.

Decode rows go together in padded groups; a longer query goes alone, in blocks of rows. A padded key is the sequence's
own last key under a mask, never a row that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from freetoken.vocab.batch import Batch

GATHER_LIMIT_BYTES = 64 << 20  # of K and V copied at once for a group of decode rows
MASK_LIMIT_BYTES = 16 << 20
MAX_BLOCK_ROWS = 512
_MIN_BLOCK_ROWS = 16
PADDING_TOKENS = 512  # keys of padding in a group cost less than another group: 0.2 µs each on a CPU, against 100


@frozen
class Geometry:
    """A group's fixed sizes. ``token_bytes`` are those of one token's K and V as they are gathered."""

    page_tokens: int
    kv_heads: int
    token_bytes: int
    window: int | None
    block_rows_limit: int = MAX_BLOCK_ROWS
    whole_causal: bool = True  # a prompt without prefix may go in one call that makes no scores


@frozen(eq=False)
class Keys:
    """Where a part's keys lie: token rows ``[start, stop)`` of the pool, or an index into its ``[rows · Hkv]``."""

    start: int = 0
    stop: int = 0
    index: Tensor | None = None


@frozen(eq=False)
class DecodePart:
    """``n`` sequences of one token each over ``length`` keys. ``rows [n] i64`` is ``None`` for the whole batch."""

    rows: Tensor | None
    count: int
    length: int
    keys: Keys
    mask: Tensor | None  # [n, 1, 1, length] bool


@frozen
class Block:
    """Query rows ``[low, high)`` of a part against its keys ``[key_low, key_high)``; ``causal`` needs no mask."""

    low: int
    high: int
    key_low: int
    key_high: int
    causal: bool = False


@frozen(eq=False)
class PrefillPart:
    """One sequence's rows ``[low, high)`` of the batch over ``length`` keys, in blocks."""

    low: int
    high: int
    length: int
    keys: Keys
    blocks: tuple[Block, ...]


@frozen(eq=False)
class TorchPlan:
    """One step. Nothing in it refers to the batch or to another plan. ``band`` masks blocks (see ``band_mask``)."""

    tokens: int
    decode: tuple[DecodePart, ...]
    prefill: tuple[PrefillPart, ...]
    band: Tensor | None = field(default=None)


def plan_step(batch: Batch, geometry: Geometry, dtype: torch.dtype) -> TorchPlan:
    """The parts of ``batch``. On a CPU it reads the page table to find sequences that lie in one piece."""
    table = batch.page_table.long()
    first_rows, row = [], 0
    for length in batch.query_lens:
        first_rows.append(row)
        row += length
    singles = [b for b, length in enumerate(batch.query_lens) if length == 1]
    contexts = [q + p for q, p in zip(batch.query_lens, batch.prefix_lens, strict=True)]
    decode = tuple(
        _decode_part(group, contexts, first_rows, table, geometry, whole=len(group) == len(contexts))
        for group in decode_groups(singles, contexts, geometry)
    )
    prefill = tuple(
        _prefill_part(first_rows[b], length, batch.prefix_lens[b], table[b], geometry)
        for b, length in enumerate(batch.query_lens)
        if length > 1
    )
    masked = [block for part in prefill for block in part.blocks if not block.causal]
    band = None
    if masked:
        rows = max(block.high - block.low for block in masked)
        columns = max(block.key_high - block.key_low + rows - (block.high - block.low) for block in masked)
        band = band_mask(rows, columns, geometry.window, dtype, table.device)
    return TorchPlan(row, decode, prefill, band)


def decode_groups(sequences: Sequence[int], contexts: Sequence[int], geometry: Geometry) -> list[list[int]]:
    """Sequences that are padded to one length together, from the longest down; the batch's order within a group.

    A group stays within the limit, and its padding within half of its keys and ``PADDING_TOKENS`` more.
    """
    seen = {b: _visible(contexts[b], geometry.window) for b in sequences}
    groups: list[list[int]] = []
    longest = wasted = 0
    for b in sorted(sequences, key=lambda b: (-seen[b], b)):
        much_shorter = 2 * seen[b] < longest
        too_wasteful = much_shorter and wasted + longest - seen[b] > PADDING_TOKENS
        if not groups or too_wasteful or (len(groups[-1]) + 1) * longest * geometry.token_bytes > GATHER_LIMIT_BYTES:
            groups.append([])
            longest, wasted = seen[b], 0
        groups[-1].append(b)
        wasted += longest - seen[b] if much_shorter else 0
    return [sorted(group) for group in groups]


def prefill_blocks(length: int, prefix: int, geometry: Geometry) -> tuple[Block, ...]:
    """Blocks of one sequence's query rows; key indices count from the first key that any row sees."""
    context = prefix + length
    first = max(0, prefix + 1 - geometry.window) if geometry.window is not None else 0
    if prefix == 0 and geometry.whole_causal and (geometry.window is None or context <= geometry.window):
        return (Block(0, length, 0, length, causal=True),)
    widest = context if geometry.window is None else min(context, geometry.window + MAX_BLOCK_ROWS)
    rows = min(geometry.block_rows_limit, max(_MIN_BLOCK_ROWS, MASK_LIMIT_BYTES // (4 * widest)))
    blocks = []
    for low in range(0, length, rows):
        high = min(length, low + rows)
        key_low = 0 if geometry.window is None else max(0, prefix + low + 1 - geometry.window)
        blocks.append(Block(low, high, key_low - first, prefix + high - first))
    return tuple(blocks)


def band_mask(rows: int, columns: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[rows, columns]``, 0 where row ``i`` sees column ``j``, else −inf; the last row sees up to the last column.

    The band depends on ``j − i`` alone, so a block with fewer rows or keys uses a rectangle of it.
    """
    ahead = torch.arange(columns, device=device) - torch.arange(rows, device=device).unsqueeze(1) - (columns - rows)
    hidden = ahead > 0
    if window is not None:
        hidden |= ahead <= -window
    return torch.zeros(rows, columns, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _visible(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _decode_part(
    group: Sequence[int], contexts: Sequence[int], first_rows: Sequence[int], table: Tensor, geometry: Geometry,
    whole: bool,
) -> DecodePart:  # fmt: skip
    device = table.device
    rows = None if whole else torch.tensor([first_rows[b] for b in group], device=device)
    lengths = [_visible(contexts[b], geometry.window) for b in group]
    longest = max(lengths)
    if len(group) == 1:
        context = contexts[group[0]]
        keys = _sequence_keys(table[group[0]], context - longest, context, geometry)
        return DecodePart(rows, 1, longest, keys, None)
    ends = torch.tensor([contexts[b] for b in group], device=device).unsqueeze(1)
    counts = torch.tensor(lengths, device=device).unsqueeze(1)
    offsets = torch.arange(longest, device=device)
    positions = torch.minimum(ends - counts + offsets, ends - 1)  # [n, length]
    pages = table if whole else table[torch.tensor(list(group), device=device)]
    slots = _slots(pages, positions, geometry.page_tokens)
    mask = (offsets < counts)[:, None, None, :] if min(lengths) < longest else None
    return DecodePart(rows, len(group), longest, Keys(index=_by_head(slots, geometry.kv_heads)), mask)


def _prefill_part(first_row: int, length: int, prefix: int, pages: Tensor, geometry: Geometry) -> PrefillPart:
    context = prefix + length
    first = 0 if geometry.window is None else max(0, prefix + 1 - geometry.window)
    keys = _sequence_keys(pages, first, context, geometry)
    blocks = prefill_blocks(length, prefix, geometry)
    return PrefillPart(first_row, first_row + length, context - first, keys, blocks)


def _sequence_keys(pages: Tensor, first: int, context: int, geometry: Geometry) -> Keys:
    """Positions ``[first, context)`` of one sequence: a slice of the pool where its pages follow one another."""
    size = geometry.page_tokens
    low, high = first // size, (context - 1) // size
    if pages.device.type == "cpu":
        ids = pages[low : high + 1].tolist()
        if ids == list(range(ids[0], ids[0] + len(ids))):
            start = ids[0] * size + first % size
            return Keys(start, start + context - first)
    slots = _slots(pages.unsqueeze(0), torch.arange(first, context, device=pages.device).unsqueeze(0), size)
    return Keys(index=_by_head(slots, geometry.kv_heads))


def _slots(pages: Tensor, positions: Tensor, size: int) -> Tensor:
    """``pages [n, max pages]``, ``positions [n, C]`` → token rows of the pool ``[n, C]``."""
    return pages.gather(1, positions // size) * size + positions % size


def _by_head(slots: Tensor, kv_heads: int) -> Tensor:
    """``slots [n, C]`` → rows of the pool seen as ``[tokens · Hkv, D]``, in the order ``[n, Hkv, C]``, flat."""
    heads = torch.arange(kv_heads, device=slots.device).view(1, kv_heads, 1)
    return (slots.unsqueeze(1) * kv_heads + heads).reshape(-1)
