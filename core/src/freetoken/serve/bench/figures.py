"""What is said of a list of times: percentiles, and how far the worst lies from the middle."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class Spread:
    """Percentiles of some measurements, in their unit. ``max_over_median`` is 1 when all are equal."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float

    @property
    def max_over_median(self) -> float:
        return self.max / self.p50 if self.p50 else float("inf")

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """``None`` where nothing was measured."""
        if not values:
            return None
        p50, p90, p99 = (percentile(values, q) for q in (50, 90, 99))
        return cls(len(values), p50, p90, p99, max(values))

    def as_json(self, scale: float = 1.0, digits: int = 3) -> dict[str, float]:
        """The numbers times ``scale``, rounded."""
        numbers = {"p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.max}
        rounded = {name: round(value * scale, digits) for name, value in numbers.items()}
        return {"count": self.count, **rounded, "max_over_median": round(self.max_over_median, 2)}


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile with linear interpolation between ranks; ``q`` from 0 to 100, ``values`` not empty."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    """The middle one; the mean of the middle two where their number is even."""
    return percentile(values, 50)
