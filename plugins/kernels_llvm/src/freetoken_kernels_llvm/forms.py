"""How a matrix in GGUF blocks is kept for the products: tiles of 16 rows by one block of columns, codes beside scales.

A tile starts with the 16 rows' scales and, where the form has them, their offsets. Then come the codes, column by
column: with ``nibbles``, byte ``j`` holds rows ``j`` and ``j + 8``; else there are 16 signed bytes. A weight is
``scale · code + offset``: the file's own numbers, not rounded once more. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from attrs import frozen

TILE_ROWS, HALF_LANES = 16, 8


@frozen
class Form:
    """One layout of tiles. ``wide`` scales are float32, others float16; ``block`` columns share them."""

    nibbles: bool
    offsets: bool
    wide: bool
    block: int

    @property
    def scale_bytes(self) -> int:
        return 4 if self.wide else 2

    @property
    def column_bytes(self) -> int:
        return TILE_ROWS // 2 if self.nibbles else TILE_ROWS

    @property
    def codes_at(self) -> int:
        """Bytes of a tile before its codes."""
        return TILE_ROWS * self.scale_bytes * (1 + self.offsets)

    @property
    def tile_bytes(self) -> int:
        return self.codes_at + self.block * self.column_bytes

    def matrix_bytes(self, rows: int, cols: int) -> int:
        """Of ``[rows, cols]``; rows are padded to whole tiles."""
        return ceil(rows / TILE_ROWS) * (cols // self.block) * self.tile_bytes


# Of every block type: whether four bits hold its codes (those around zero are lifted, with an offset), whether it has
# offsets, whether its scales are products that float16 does not hold, and how many weights share one.
FORMS: Mapping[str, Form] = {
    "q4_0": Form(True, True, False, 32),
    "q4_1": Form(True, True, False, 32),
    "q5_0": Form(False, False, False, 32),
    "q5_1": Form(False, True, False, 32),
    "q8_0": Form(False, False, False, 32),
    "q2_k": Form(True, True, True, 16),
    "q3_k": Form(True, True, True, 16),
    "q4_k": Form(True, True, True, 32),
    "q5_k": Form(False, True, True, 32),
    "q6_k": Form(False, False, True, 16),
    "iq4_nl": Form(False, False, False, 32),
    "iq4_xs": Form(False, False, True, 32),
    "mxfp4": Form(False, False, True, 32),
}
LIFT: Mapping[str, int] = {"q4_0": 8, "q3_k": 4}  # what is added to codes so that four bits hold them

PREFIX = "gguf."


def form_of(formats: Iterable[str]) -> Form:
    """The smallest form that holds all of ``formats`` (``gguf.q4_1``, …): one matrix may be stacked from several."""
    parts = [FORMS[name.removeprefix(PREFIX)] for name in formats]
    nibbles = all(p.nibbles for p in parts)
    return Form(nibbles, any(p.offsets for p in parts), any(p.wide for p in parts), min(p.block for p in parts))
