"""Stop strings, looked for in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete, holding back only what may be the start of one.

    The first stop string to *end* wins, among those the one that began earliest, so the outcome does not depend on how
    the text is cut. ``include_stop`` leaves the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty: SamplingParams refuses it")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """``(emit, stopped)``: text that is safe to send, and the stop string once one is complete, else ``None``."""
        if self.matched is not None or not self._stops:
            return ("", self.matched) if self.matched is not None else (text, None)
        self._held += text
        found = self._first_to_end()
        if found is None:
            return self._release(len(self._held) - self._possible_start()), None
        start, self.matched = found
        emit = self._release(start + len(self.matched) if self._include_stop else start)
        self._held = ""
        return emit, self.matched

    def flush(self) -> str:
        """What is still held back when the stream ends without a stop string."""
        return self._release(len(self._held))

    def _first_to_end(self) -> tuple[int, str] | None:
        starts = [(self._held.find(stop), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max(_overlap(self._held, stop) for stop in self._stops)

    def _release(self, length: int) -> str:
        emit, self._held = self._held[:length], self._held[length:]
        return emit


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ends ``text``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
