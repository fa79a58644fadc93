"""Captured batch sizes. Oracle: the rule itself, for every maximum to 600 and every batch below it."""

from __future__ import annotations

import pytest

from freetoken.run.graph_sizes import captured_size, graph_sizes


@pytest.mark.parametrize("most", [*range(1, 70), 96, 128, 200, 256, 257, 512, 600])
def test_every_size_to_8_then_little_padding_and_always_the_maximum(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert set(range(1, min(8, most) + 1)) <= set(sizes)
    for rows in range(1, most + 1):
        size = captured_size(sizes, rows)
        assert size is not None
        assert rows <= size
        assert rows <= 8 or (size - rows) / size <= 0.125, f"{rows} rows in a graph of {size}"
        assert size == min(s for s in sizes if s >= rows)
    assert captured_size(sizes, most + 1) is None


def test_few_graphs() -> None:
    """Each size past 8 is the largest that its padding allows, so their number grows with the logarithm."""
    assert len(graph_sizes(32)) == 16
    assert len(graph_sizes(256)) < 32
