"""What attention takes beside the pools: the parts of split contexts, and the buffers of captured plans."""

from __future__ import annotations

from freetoken.plugin.protocols import AttentionSetup
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.units import ceil_div
from freetoken_attention_triton.launches import Geometry, splits
from freetoken_attention_triton.shape import attention_shape

FLOAT_BYTES = INT_BYTES = 4


def part_rows(geometry: Geometry, tokens: int, sequences: int, max_context: int, is_decode: bool) -> int:
    """Rows (tokens × parts) that a step's split contexts need; at least one, so that there is an address."""
    parts = splits(geometry, tokens, sequences, max_context, is_decode)
    filling = tokens * parts.prefill if parts.prefill > 1 else 0
    decoding = sequences * parts.decode if parts.decode > 1 else 0
    return max(1, filling, decoding)


def most_part_rows(geometry: Geometry, max_sequences: int, max_tokens: int, max_context: int) -> int:
    """The largest ``part_rows`` of any step. Splitting stops once the multiprocessors are busy, so few sizes count."""
    most = max(part_rows(geometry, n, n, max_context, True) for n in range(1, max_sequences + 1))
    busy = geometry.queries * (geometry.multiprocessors // geometry.kv_heads + 1)
    for tokens in range(1, min(max_tokens, busy) + 1):
        most = max(most, part_rows(geometry, tokens, 1, max_context, False))
    return most


def workspace(setup: AttentionSetup) -> tuple[MemoryClaim, ...]:
    """Scratch of one step, and what captured plans share for good. Pure."""
    geometry = Geometry.of(attention_shape(setup), setup.device)
    limits = setup.limits
    row_bytes = geometry.q_heads * (geometry.v_dim + 1) * FLOAT_BYTES
    rows = most_part_rows(geometry, limits.max_running_requests, limits.max_prefill_tokens, limits.max_seq_tokens)
    table_bytes = limits.max_running_requests * (ceil_div(limits.max_seq_tokens, limits.page_tokens) + 8) * INT_BYTES
    decode_rows = max(
        part_rows(geometry, n, n, limits.max_seq_tokens, True) for n in range(1, limits.max_running_requests + 1)
    )
    graph_bytes = decode_rows * row_bytes + table_bytes
    return (
        MemoryClaim(setup.group.name, "captured attention plans", graph_bytes, graph_bytes),
        MemoryClaim(setup.group.name, "attention scratch of a step", 0, rows * row_bytes + table_bytes),
    )
