"""Tiles and splits: pure tables of head size, dtype and device. Nothing is measured at run time."""

from __future__ import annotations

from functools import lru_cache

from attrs import frozen

from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.hardware import Device
from freetoken.vocab.units import ceil_div

MAX_SPLITS = 128
DECODE_PROGRAMS = 3  # to a multiprocessor; their shared memory fits, and their loads hide each other's latency
MIN_SPLIT_KEYS = 512
MIN_DECODE_BLOCKS = 2
"""Blocks of keys that a part of a split context has at least: the first costs its latency, the second hides behind it.
500 keys then make 4 parts, 1,000 make 8, where every block was a part of its own, and all 99 places were joined."""

COMBINE_TILE = (64, 32)
"""Parts and columns that one program joins at a time: 32 columns are a whole 128-byte line of each part, and 32 heads
of 128 columns make 128 programs, about one for each multiprocessor where one sequence is decoded."""

SPARE_SHARED_BYTES = 2048  # what Triton keeps beside the operands: barriers and scratch of layout changes
ASSUMED_SHARED_BYTES = 101_376  # of a device that does not say; every card since compute capability 8.0 has as much
ASSUMED_MULTIPROCESSORS = 8
HOPPER = 90


@frozen
class Tile:
    """``rows`` (queries × heads of one key head) against ``keys`` at a time, ``num_stages`` in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, k_dim: int, v_dim: int, itemsize: int) -> int:
        """A bound on the shared memory: queries, and the blocks of keys and values held at once.

        A page number is read before each block of keys, so Triton spends every other stage on it.
        """
        blocks = max(2, (self.num_stages + 1) // 2) if self.num_stages > 1 else 1
        return (self.rows * k_dim + blocks * self.keys * (k_dim + v_dim)) * itemsize + SPARE_SHARED_BYTES


@lru_cache(maxsize=1024)
def padded(size: int, least: int = 16) -> int:
    """The smallest power of two that is at least ``size`` and ``least``."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def prefill_tiles(dim: int, itemsize: int, arch: int) -> tuple[Tile, ...]:
    """Tiles for a padded head size, best first. Wide ones feed the tensor cores; later ones need less shared memory."""
    if itemsize == 4:
        return (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1))
    large = dim > 128
    wide: tuple[Tile, ...]
    if arch >= HOPPER and arch < 120:
        if large:
            wide = (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2))
        else:
            wide = (Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2))
    else:
        wide = (Tile(64, 32, 4, 2),) if large else (Tile(128, 64, 8, 2), Tile(128, 32, 4, 3))
    return (*wide, Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 4, 1))


def decode_tiles(dim: int, itemsize: int, rows: int) -> tuple[Tile, ...]:
    """Tiles for one query of ``rows`` heads, best first: what counts is how many bytes are in flight."""
    keys = 64 if dim * itemsize <= 256 else 32
    deep = Tile(rows, keys, 4, 5), Tile(rows, keys, 4, 3)
    return (*deep, Tile(rows, 32, 4, 5), Tile(rows, 32, 4, 3), Tile(rows, 16, 4, 3), Tile(rows, 16, 4, 1))


def _first_that_fits(tiles: tuple[Tile, ...], k_dim: int, v_dim: int, itemsize: int, shared_bytes: int) -> Tile:
    fitting = (tile for tile in tiles if tile.shared_bytes(k_dim, v_dim, itemsize) <= shared_bytes)
    return next(fitting, tiles[-1])


def prefill_tile(k_dim: int, v_dim: int, group: int, dtype: str, device: Device) -> Tile:
    """The tile for prefill and extend; never fewer rows than the heads that share a key head."""
    itemsize = itemsize_bytes(dtype)
    k, v = padded(k_dim), padded(v_dim)
    tiles = prefill_tiles(max(k, v), itemsize, device.arch)
    tile = _first_that_fits(tiles, k, v, itemsize, device.shared_memory_bytes or ASSUMED_SHARED_BYTES)
    rows = max(tile.rows, padded(group, 1))
    return Tile(rows, tile.keys, tile.num_warps, tile.num_stages)


def decode_tile(k_dim: int, v_dim: int, group: int, dtype: str, device: Device) -> Tile:
    """The tile for sequences that bring one token. At least two programs share a multiprocessor's memory."""
    itemsize = itemsize_bytes(dtype)
    k, v = padded(k_dim), padded(v_dim)
    tiles = decode_tiles(max(k, v), itemsize, padded(group))
    half = (device.shared_memory_bytes or ASSUMED_SHARED_BYTES) // 2
    return _first_that_fits(tiles, k, v, itemsize, half)


def decode_splits(sequences: int, kv_heads: int, multiprocessors: int) -> int:
    """Programs that share one context: as many as give each multiprocessor ``DECODE_PROGRAMS``.

    Not a function of the context: a captured graph does not know it, and eager steps must equal graphs bit for bit.
    A program whose share of a short context is empty ends at once.
    """
    programs = sequences * kv_heads
    return max(1, min(MAX_SPLITS, DECODE_PROGRAMS * multiprocessors // programs))


def prefill_splits(tiles: int, kv_heads: int, multiprocessors: int, max_context: int) -> int:
    """More than one only where few queries meet a long context, and most multiprocessors would idle."""
    programs = tiles * kv_heads
    if 2 * programs > multiprocessors:
        return 1
    return max(1, min(MAX_SPLITS, 2 * multiprocessors // programs, ceil_div(max_context, MIN_SPLIT_KEYS)))
