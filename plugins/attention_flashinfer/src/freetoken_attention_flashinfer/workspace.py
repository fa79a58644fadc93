"""What FlashInfer takes beside the pools: the parts of split contexts, and each live plan's own arrays. Pure.

The sizes follow from how the library plans a step (``PrefillPlan`` and ``PrefillSM90Plan`` of its 0.6.18): queries of a
group's heads are rows of one tile; a context is split while the card has room; in a graph it is always split, and the
arrays are as long as the largest replay needs.
"""

from __future__ import annotations

from math import ceil, log

from attrs import frozen

from freetoken.plugin.protocols import AttentionLimits, AttentionSetup
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.units import ceil_div
from freetoken_attention_flashinfer.kernels import ASSUMED_MULTIPROCESSORS, FA3_TILE_ROWS

INT_BYTES = FLOAT_BYTES = 4
ALIGN_BYTES = 16  # of every array within a workspace
BLOCKS = 2  # that the library counts on a multiprocessor
SMALL_TILE, MIDDLE_TILE, LARGE_TILE = 16, 64, 128
LARGE_TILE_BELOW = 256  # head size: larger heads leave no room for the large tile
FA3_ARRAYS = 7

RING = 2
"""Wrappers of a captured size: while the device may still read one plan's host arrays, the next goes to the other."""

LIVE_PLANS = 8
"""Plans of uncaptured steps that are accounted for: the step in flight, the one being planned, and the chunks of a
window that pass a layer together. One more takes some hundred kilobytes."""

WRAPPER_BYTES = 32_768 * INT_BYTES
"""Of a wrapper's own array of context lengths."""

TRANSIENT_BYTES = 8 << 20
"""A wrapper makes a workspace of its own before it is given ours, on the device and pinned on the host."""


@frozen
class Sizes:
    """What the arithmetic needs of a group and a card."""

    q_heads: int
    kv_heads: int
    head_dim: int
    multiprocessors: int

    @classmethod
    def of(cls, setup: AttentionSetup) -> Sizes:
        group = setup.group
        multiprocessors = setup.device.multiprocessors or ASSUMED_MULTIPROCESSORS
        return cls(group.q_heads, group.cache.heads, group.head_dim, multiprocessors)

    @property
    def sharing(self) -> int:
        """Query heads to a key head."""
        return self.q_heads // self.kv_heads

    @property
    def split_parts(self) -> int:
        """Parts, over all tiles, into which contexts may be split at most."""
        return BLOCKS * self.multiprocessors // self.kv_heads

    @property
    def largest_tile(self) -> int:
        return LARGE_TILE if self.head_dim < LARGE_TILE_BELOW else MIDDLE_TILE

    @property
    def decode_tile(self) -> int:
        """Rows of a tile where every sequence brings one token."""
        if self.sharing <= SMALL_TILE:
            return SMALL_TILE
        return MIDDLE_TILE if self.sharing <= MIDDLE_TILE else self.largest_tile

    def parts(self, tokens: int, sequences: int) -> int:
        """The most parts of any uncaptured step within these limits: tiles, or splits of fewer tiles."""
        tiles = max(2 * sequences, tokens * self.sharing // MIDDLE_TILE + sequences)
        return max(self.split_parts, tiles)

    def captured_parts(self, sequences: int) -> int:
        """The parts that a captured step is made for."""
        return max(self.split_parts, ceil_div(sequences * self.sharing, self.decode_tile) + sequences - 1)

    def _floats(self, parts: int, tile: int) -> int:
        return self.q_heads * parts * tile * (self.head_dim + 1) * FLOAT_BYTES + 2 * ALIGN_BYTES

    def float_bytes(self) -> int:
        """Partial outputs and their log-sums of any uncaptured step; only steps of few tiles are split."""
        return self._floats(self.split_parts, self.largest_tile)

    def captured_float_bytes(self, sequences: int) -> int:
        return self._floats(self.captured_parts(sequences), self.decode_tile)

    def _ints(self, parts: int, tokens: int, sequences: int) -> int:
        lengths = (*(3 * [parts * INT_BYTES]), (sequences + 1) * INT_BYTES, INT_BYTES, INT_BYTES)
        return sum(_aligned(n) for n in (*lengths, (tokens + 1) * INT_BYTES, parts))

    def int_bytes(self, tokens: int, sequences: int) -> int:
        """The arrays of one uncaptured plan, whichever kernel it is for."""
        tiles = tokens // FA3_TILE_ROWS + sequences
        fa3 = FA3_ARRAYS * _aligned(self.q_heads * tiles * INT_BYTES) + _aligned((self.multiprocessors + 1) * INT_BYTES)
        return max(self._ints(self.parts(tokens, sequences), tokens, sequences), fa3)

    def captured_int_bytes(self, sequences: int) -> int:
        return self._ints(self.captured_parts(sequences), sequences, sequences)


def shared_float_bytes(sizes: Sizes, limits: AttentionLimits) -> int:
    """The one buffer for parts of contexts. Steps run one after another, so all of them share it."""
    return max(sizes.float_bytes(), sizes.captured_float_bytes(limits.max_running_requests))


def most_tokens(limits: AttentionLimits) -> int:
    """Of one step: a chunk of prompts, and a token of every running request."""
    return limits.max_prefill_tokens + limits.max_running_requests


def page_ids_bytes(limits: AttentionLimits) -> int:
    """Page ids of the largest batch."""
    return limits.max_running_requests * ceil_div(limits.max_seq_tokens, limits.page_tokens) * INT_BYTES


def captured_sizes(max_sequences: int) -> int:
    """No fewer than the batch sizes that are captured: all to eight, then steps of at most an eighth of padding."""
    return max_sequences if max_sequences <= 8 else 8 + ceil(log(max_sequences / 8) / log(8 / 7))


def workspace(setup: AttentionSetup) -> tuple[MemoryClaim, ...]:
    """What a group's backend takes for good, and for a moment."""
    sizes, limits, owner = Sizes.of(setup), setup.limits, setup.group.name
    sequences = limits.max_running_requests
    plan = sizes.int_bytes(most_tokens(limits), sequences)
    wrappers = RING * captured_sizes(sequences)
    captured = sizes.captured_int_bytes(sequences)
    ids = page_ids_bytes(limits)
    graph = captured + ids + 3 * _aligned((sequences + 1) * INT_BYTES) + wrappers * WRAPPER_BYTES
    live = LIVE_PLANS * (plan + WRAPPER_BYTES)
    return (
        MemoryClaim(owner, "parts of split contexts", shared_float_bytes(sizes, limits)),
        MemoryClaim(owner, "captured attention plans", graph, graph + TRANSIENT_BYTES),
        MemoryClaim(owner, "attention plans of steps", live, live + 2 * ids),
        MemoryClaim(owner, "pinned attention plans", LIVE_PLANS * plan + wrappers * captured, where="host"),
    )


def _aligned(count_bytes: int) -> int:
    return ceil_div(count_bytes, ALIGN_BYTES) * ALIGN_BYTES
