"""Server-sent events: how a chunk of an answer becomes bytes.

A token's chunk differs from the one before only in its text, so everything else is encoded once per choice and a chunk
costs one string escape and one join (0.3 µs; ``json.dumps`` of the same object takes 7.6 on the same machine).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring

DONE = b"data: [DONE]\n\n"

_MARK = "\x00text\x00"


def dumps(value: object) -> str:
    """Compact JSON, text as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event(value: object) -> bytes:
    """One event whose data is ``value`` as JSON."""
    return f"data: {dumps(value)}\n\n".encode()


class ChunkTemplate:
    """An event with one hole for a JSON string; made from a ``sample`` in which ``hole()`` stands for it."""

    __slots__ = ("_after", "_before")

    def __init__(self, sample: Mapping[str, object]) -> None:
        before, _, after = dumps(sample).partition(dumps(_MARK))
        self._before = f"data: {before}"
        self._after = f"{after}\n\n"

    @staticmethod
    def hole() -> str:
        return _MARK

    def fill(self, text: str) -> bytes:
        """The event with ``text`` in the hole."""
        return f"{self._before}{encode_basestring(text)}{self._after}".encode()
