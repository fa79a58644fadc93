"""How a step is cut into groups, blocks and masks: pure decisions, checked against their definitions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.builtin import attention_torch
from freetoken.ops import attention_plan, paged_attention
from freetoken.ops.attention_plan import Geometry, band_mask, decode_groups, plan_step, prefill_blocks
from freetoken.testing.fakes import make_batch


def geometry(window: int | None = None, **more: int) -> Geometry:
    return Geometry(16, 2, 512, window, **more)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.sampled_from([None, 100]))
def test_groups_hold_every_sequence_once_and_waste_little(contexts: list[int], window: int | None) -> None:
    """Property: a partition in the batch's order, padded by half of its keys and a constant at most."""
    groups = decode_groups(range(len(contexts)), contexts, geometry(window))
    assert sorted(b for group in groups for b in group) == list(range(len(contexts)))
    for group in groups:
        seen = [min(contexts[b], window or contexts[b]) for b in group]
        assert group == sorted(group)
        keys = len(seen) * max(seen)
        assert keys - sum(seen) <= keys / 2 + attention_plan.PADDING_TOKENS
        assert len(group) == 1 or len(group) * max(seen) * 512 <= attention_plan.GATHER_LIMIT_BYTES


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(2, 3000), prefix=st.integers(0, 9000), window=st.sampled_from([None, 5, 600, 20_000]),
    whole=st.booleans(),
)  # fmt: skip
def test_blocks_cover_the_rows_and_the_keys_each_row_sees(
    length: int, prefix: int, window: int | None, whole: bool
) -> None:
    """Property: consecutive blocks, every visible key inside, masks within the limit."""
    blocks = prefill_blocks(length, prefix, Geometry(16, 2, 512, window, whole_causal=whole))
    assert (blocks[0].low, blocks[-1].high) == (0, length)
    assert all(a.high == b.low for a, b in pairwise(blocks))
    first = max(0, prefix + 1 - window) if window else 0
    for block in blocks:
        lowest = max(0, prefix + block.low + 1 - window) if window else 0
        assert block.key_low == lowest - first
        assert block.key_high == prefix + block.high - first
        if block.causal:
            assert prefix == 0
        else:
            mask_bytes = 4 * (block.high - block.low) * (block.key_high - block.key_low)
            assert mask_bytes <= 2 * attention_plan.MASK_LIMIT_BYTES


@pytest.mark.parametrize("window", [None, 1, 3])
def test_band_is_causal_and_windowed(window: int | None) -> None:
    """Oracle: the definition, for the whole band and for every smaller rectangle a block may take of it."""
    band = band_mask(4, 9, window, torch.float32, torch.device("cpu"))
    for rows in range(1, 5):
        for columns in range(rows, 9 - (4 - rows) + 1):
            corner = paged_attention._corner(band, rows, columns)
            for i in range(rows):
                position = columns - rows + i
                for j in range(columns):
                    sees = j <= position and (window is None or j > position - window)
                    assert (float(corner[i, j]) == 0) == sees


def test_a_plan_refers_to_nothing_of_its_batch() -> None:
    """Oracle: the tensors' memory: a batch's tensors may be overwritten while its plan lives."""
    batch = make_batch((1, 3, 1), (20, 40, 70))
    plan = plan_step(batch, geometry(), torch.float32)
    of_batch = {t.untyped_storage().data_ptr() for t in (batch.page_table, batch.query_starts, batch.context_lens)}
    held = [part.keys.index for part in (*plan.decode, *plan.prefill)] + [part.rows for part in plan.decode]
    held += [part.mask for part in plan.decode] + [plan.band]
    assert not of_batch & {t.untyped_storage().data_ptr() for t in held if t is not None}


def test_one_piece_is_a_slice() -> None:
    """Oracle: the page table: consecutive ids need no index, others do."""
    together = plan_step(make_batch((1,), (90,), contiguous=True), geometry(), torch.float32)
    apart = plan_step(make_batch((1,), (90,), num_pages=60), geometry(), torch.float32)
    assert together.decode[0].keys.index is None
    assert (together.decode[0].keys.start, together.decode[0].keys.stop) == (16, 16 + 91)
    assert apart.decode[0].keys.index is not None


def test_declared_limits_are_the_ones_in_force() -> None:
    """Oracle: the constants of the implementation, which the spec's module may not import."""
    assert attention_torch.GATHER_LIMIT_BYTES == attention_plan.GATHER_LIMIT_BYTES
    assert attention_torch.MASK_LIMIT_BYTES == attention_plan.MASK_LIMIT_BYTES
    assert attention_torch.SCORES_LIMIT_BYTES == paged_attention.SCORES_LIMIT_BYTES
