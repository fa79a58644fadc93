"""Tiles and splits. Oracle: properties that any choice must have, over every card and shape."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.testing.launches import DEVICES
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.ops import OpShape
from freetoken_attention_triton.launches import Geometry, launches
from freetoken_attention_triton.spec import SPEC
from freetoken_attention_triton.tiles import (
    DECODE_PROGRAMS,
    MAX_SPLITS,
    decode_splits,
    decode_tile,
    padded,
    prefill_splits,
    prefill_tile,
)
from freetoken_attention_triton.workspace import most_part_rows, part_rows

DEVICE_NAMES = sorted(DEVICES)
DTYPES = ("bfloat16", "float16", "float32")
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@pytest.mark.parametrize("name", DEVICE_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_fits_its_card(name: str, dtype: str) -> None:
    device = DEVICES[name]
    for dim in sorted(SPEC.head_dims):
        for group in (1, 3, 8, 16):
            prefill = prefill_tile(dim, dim, group, dtype, device)
            decode = decode_tile(dim, dim, group, dtype, device)
            for tile in (prefill, decode):
                assert tile.shared_bytes(padded(dim), padded(dim), ITEMSIZE[dtype]) <= device.shared_memory_bytes
                assert tile.rows >= group
                assert tile.rows >= 16
                assert tile.keys >= 16
                assert tile.rows & (tile.rows - 1) == tile.keys & (tile.keys - 1) == 0


def test_a_device_that_says_nothing_gets_a_tile_for_the_smallest_card() -> None:
    unknown = Device("cuda", compute_capability=(8, 6))
    assert prefill_tile(128, 128, 8, "bfloat16", unknown) == prefill_tile(128, 128, 8, "bfloat16", DEVICES["rtx3090"])


@given(st.integers(1, 1024), st.integers(1, 64), st.integers(1, 200))
@settings(deadline=None)
def test_decode_splits_fill_the_card_and_no_more(sequences: int, kv_heads: int, multiprocessors: int) -> None:
    count = decode_splits(sequences, kv_heads, multiprocessors)
    assert 1 <= count <= MAX_SPLITS
    assert count == 1 or sequences * kv_heads * count <= DECODE_PROGRAMS * multiprocessors
    more = decode_splits(sequences + 1, kv_heads, multiprocessors)
    assert more <= count


@given(st.integers(1, 2000), st.integers(1, 64), st.integers(1, 200), st.integers(1, 300_000))
@settings(deadline=None)
def test_prefill_splits_only_where_multiprocessors_would_idle(
    tiles: int, kv_heads: int, multiprocessors: int, context: int
) -> None:
    count = prefill_splits(tiles, kv_heads, multiprocessors, context)
    assert 1 <= count <= MAX_SPLITS
    if count > 1:
        assert tiles * kv_heads * count <= 2 * multiprocessors
        assert context > (count - 1) * 512
    if context <= 512 or 2 * tiles * kv_heads > multiprocessors:
        assert count == 1


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=20),
    st.sampled_from((1, 3, 8, 128)),
)
@settings(deadline=None)
def test_every_query_has_its_tile(query_lens: list[int], group: int) -> None:
    """Oracle: tiles laid out sequence by sequence, against the arithmetic that the kernel searches in."""
    shape = OpShape("attention", "bfloat16", q_heads=2 * group, kv_heads=2, head_dim=128, page_tokens=16)
    geometry = Geometry.of(shape, DEVICES["h200"])
    starts = [sum(query_lens[:b]) for b in range(len(query_lens) + 1)]
    first_tiles = [start // geometry.queries + b for b, start in enumerate(starts)]
    assert geometry.tiles(starts[-1], len(query_lens)) == first_tiles[-1]
    for b, length in enumerate(query_lens):
        assert first_tiles[b + 1] - first_tiles[b] >= -(-length // geometry.queries)


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_no_step_needs_more_scratch_than_is_claimed(name: str) -> None:
    """Oracle: every step of a small space, one by one."""
    shape = OpShape("attention", "bfloat16", q_heads=32, kv_heads=4, head_dim=128, page_tokens=16)
    geometry = Geometry.of(shape, DEVICES[name])
    claimed = most_part_rows(geometry, 40, 900, 30_000)
    for tokens in range(1, 901):
        for sequences in {1, 2, min(tokens, 40)}:
            for context in (1, 511, 513, 30_000):
                assert part_rows(geometry, tokens, sequences, context, False) <= claimed
    assert max(part_rows(geometry, n, n, 30_000, True) for n in range(1, 41)) <= claimed


def test_the_grid_of_a_decode_step_does_not_follow_the_context() -> None:
    """A captured graph serves any context, and an eager step equals it bit for bit."""
    shape = OpShape("attention", "bfloat16", q_heads=32, kv_heads=4, head_dim=128, page_tokens=16)
    for sequences in (1, 3, 64):
        points = [StepPoint(sequences, sequences, 1, context, sequences, True) for context in (2, 100, 131_072)]
        made = [launches(point, shape, DEVICES["h200"]) for point in points]
        assert len({tuple(launch.grid for launch in found) for found in made}) == 1
        assert len({tuple(dict(launch.args).get("splits") for launch in found) for found in made}) == 1
