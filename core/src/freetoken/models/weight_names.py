"""What a model's parameters are called and how large they are, in the model and in the files.

A block lists its parameters once; the slots for the loader, the number of parameters and the tensors of a checkpoint
writer all follow from that list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from attrs import frozen

from freetoken.vocab.weight import CheckpointIndex, Source, WeightSlot


@frozen
class Piece:
    """One stored tensor, or the ``rows`` of it, and the piece's own shape.

    ``rope_heads`` is set where the rows are heads that rotary embedding turns.
    """

    tensor: str
    shape: tuple[int, ...]
    rope_heads: int = 0
    rows: tuple[int, int] | None = None


@frozen
class Parameter:
    """One slot of the model and the pieces that are stacked along their first axis to fill it."""

    slot: str
    kind: str
    pieces: tuple[Piece, ...]
    dtype: str | None = None
    add: float = 0.0
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.pieces[0].shape
        return (sum(p.shape[0] for p in self.pieces), *first[1:])

    @property
    def elements(self) -> int:
        return prod(self.shape)


@frozen
class Names:
    """A thing's two names: prefixes that end in a dot or are empty, ``slot`` in the model, ``stored`` in files."""

    slot: str
    stored: str
    layer: int | None = None

    def linear(self, slot: str, *pieces: tuple[str, int, int], cols: int) -> Parameter:
        """A matrix ``[O, cols]`` of stacked ``(name, rows, rope heads)`` pieces."""
        taken = tuple(Piece(f"{self.stored}{n}.weight", (rows, cols), heads) for n, rows, heads in pieces)
        return Parameter(self.slot + slot, "linear", taken, layer=self.layer)

    def rows(self, slot: str, tensor: str, pieces: Iterable[range], cols: int) -> Parameter:
        """A matrix ``[O, cols]`` of row ranges of one stored tensor, in the given order."""
        stored = f"{self.stored}{tensor}.weight"
        taken = tuple(Piece(stored, (len(r), cols), rows=(r.start, r.stop)) for r in pieces)
        return Parameter(self.slot + slot, "linear", taken, layer=self.layer)

    def matrix(self, kind: str, slot: str, tensor: str, shape: tuple[int, int]) -> Parameter:
        """A matrix that is stored under its full name as one tensor."""
        return Parameter(self.slot + slot, kind, (Piece(self.stored + tensor, shape),), layer=self.layer)

    def vector(
        self, slot: str, tensor: str, shape: tuple[int, ...], *, add: float = 0.0, dtype: str | None = None
    ) -> Parameter:
        """A small tensor that is used as it is."""
        return Parameter(self.slot + slot, "vector", (Piece(self.stored + tensor, shape),), dtype, add, self.layer)


def slots_of(parameters: Iterable[Parameter], *, permuted: bool) -> tuple[WeightSlot, ...]:
    """The loader's view of ``parameters``; ``permuted`` undoes the row order of GGUF's ``llama`` architecture."""
    return tuple(
        WeightSlot(
            p.slot,
            p.kind,
            tuple(
                Source(piece.tensor, rows=piece.rows, unpermute_heads=piece.rope_heads if permuted else 0)
                for piece in p.pieces
            ),
            p.shape,
            p.dtype,
            layer=p.layer,
            add=p.add,
        )
        for p in parameters
    )


def prefix_in(index: CheckpointIndex, candidates: Sequence[str], probe: str) -> str:
    """The first of ``candidates`` under which ``probe`` is stored; the first of all where none is."""
    return next((c for c in candidates if c + probe in index.tensors), candidates[0])
