"""Which decode batch sizes are captured. Pure."""

from __future__ import annotations

from bisect import bisect_left

MAX_PADDING = 0.125


def graph_sizes(max_running: int) -> tuple[int, ...]:
    """Every size to 8, then steps with at most 12.5 % padding, always the maximum; ascending.

    A batch of ``n`` runs in the smallest size ``s ≥ n``; ``(s − n) / s ≤ 12.5 %`` for every ``n``.
    """
    sizes = list(range(1, min(8, max_running) + 1))
    while sizes[-1] < max_running:
        # The next batch, last + 1, is the one that is padded most: s − (last + 1) ≤ s / 8.
        sizes.append(min(max_running, int((sizes[-1] + 1) / (1 - MAX_PADDING))))
    return tuple(sizes)


def captured_size(sizes: tuple[int, ...], rows: int) -> int | None:
    """The size that serves ``rows``, or ``None`` when it is larger than all."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None
