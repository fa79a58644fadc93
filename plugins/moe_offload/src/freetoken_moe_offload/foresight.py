"""Which experts of the next layer are worth fetching while this one computes, and whether foresight is any good here.

Arithmetic alone. A fetch ahead that nobody wants is traffic that the next layer waits behind, so only what a prompt is
all but sure to want is fetched, and where that turns out wrong too often nothing is fetched for a while.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

LEAST_PAIRS = 32
"""An expert that fewer pairs of a prompt are foreseen to want may well be wanted by none."""

SHARE_OF_MEAN = 8
"""Nor is one that is foreseen less than an eighth as often as the mean."""

MOST_WASTED = 0.05
MEMORY = 0.9  # of what was useful and wasted, with each layer
LONGEST_PAUSE = 1024  # layers


def likely(pairs: Sequence[int]) -> list[int]:
    """The experts that are all but sure to be wanted, the surest first; ``pairs[e]`` are foreseen to want ``e``."""
    least = max(LEAST_PAIRS, sum(pairs) / (SHARE_OF_MEAN * max(len(pairs), 1)))
    return sorted((e for e, count in enumerate(pairs) if count >= least), key=lambda e: (-pairs[e], e))


def room_ahead(slots: int, experts: int) -> int:
    """How many experts of a next layer may lie in slots beside the layer at hand: what decode likes keeps seven eighths
    of the slots, and a layer with all its experts finds room."""
    return max(0, min(slots // 8, slots - experts))


@define
class Trust:
    """Whether to look ahead: not for a while after more than ``MOST_WASTED`` of what was fetched went unused."""

    useful: float = 0.0
    wasted: float = 0.0
    pause: int = 0
    _next_pause: int = 8

    def ask(self) -> bool:
        """Once a layer."""
        if self.pause:
            self.pause -= 1
            return False
        return True

    def learn(self, useful: int, wasted: int) -> None:
        """What became of one layer's experts that were fetched ahead."""
        self.useful = MEMORY * self.useful + useful
        self.wasted = MEMORY * self.wasted + wasted
        if wasted and self.wasted > MOST_WASTED * (self.useful + self.wasted):
            self.pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self.useful = self.wasted = 0.0
        elif useful and self._next_pause > 8:
            self._next_pause -= 1
