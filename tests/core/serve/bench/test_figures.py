"""Percentiles. Oracle: numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.serve.bench.figures import Spread, median, percentile

VALUES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(np.percentile(values, q))


@given(VALUES)
def test_a_spread_is_in_order(values: list[float]) -> None:
    """Property: percentiles do not fall, the largest is one of the values, the median is numpy's."""
    spread = Spread.of(values)
    assert spread is not None
    assert spread.p50 <= spread.p90 * (1 + 1e-9)
    assert spread.p90 <= spread.p99 * (1 + 1e-9)
    assert spread.max == max(values)
    assert spread.count == len(values)
    assert median(values) == pytest.approx(np.median(values))
    assert spread.max_over_median == pytest.approx(max(values) / np.median(values))


def test_nothing_measured_has_no_spread() -> None:
    assert Spread.of([]) is None


def test_json_is_scaled() -> None:
    spread = Spread.of([0.001, 0.001, 0.004])
    assert spread is not None
    assert spread.as_json(1000) == {"count": 3, "p50": 1.0, "p90": 3.4, "p99": 3.94, "max": 4.0, "max_over_median": 4.0}
