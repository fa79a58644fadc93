"""How checkpoints keep experts: a tensor each, or stacked, in every published form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attrs import frozen

from freetoken.vocab.weight import CheckpointIndex, Source

Shapes = Mapping[str, tuple[int, ...]]


@frozen
class ExpertSizes:
    """``experts`` of ``gate``, ``up [I, H]`` and ``down [H, I]``."""

    experts: int
    hidden: int
    intermediate: int


class ExpertLayout(Protocol):
    """One form. ``block`` is the prefix, after the layer's, of the router and of a shared expert."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> str: ...

    def tensors(self, sizes: ExpertSizes) -> Shapes:
        """The stored tensors' names, after the layer's prefix, with their shapes."""
        ...

    def sources(self, prefix: str, expert: int, sizes: ExpertSizes) -> tuple[Source, Source, Source]:
        """Where one expert's gate, up and down are under the layer's ``prefix``."""
        ...


@frozen
class OneEach:
    """A tensor for each matrix of each expert: gate and up ``[I, H]``, down ``[H, I]``."""

    name: str
    block: str
    gate: str
    up: str
    down: str

    def tensors(self, sizes: ExpertSizes) -> Shapes:
        wide, tall = (sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)
        shapes = ((self.gate, wide), (self.up, wide), (self.down, tall))
        return {self._stored(e, part): shape for e in range(sizes.experts) for part, shape in shapes}

    def sources(self, prefix: str, expert: int, sizes: ExpertSizes) -> tuple[Source, Source, Source]:
        gate, up, down = (prefix + self._stored(expert, part) for part in (self.gate, self.up, self.down))
        return Source(gate), Source(up), Source(down)

    def _stored(self, expert: int, part: str) -> str:
        return f"{self.block}experts.{expert}.{part}.weight"


@frozen
class Stacked:
    """Gate and up in one tensor ``[E, 2I, H]`` and down ``[E, H, I]``; transposed, ``[E, H, 2I]`` and ``[E, I, H]``."""

    name: str
    gate_up: str
    down: str
    transpose: bool = False
    block: str = "mlp."

    def tensors(self, sizes: ExpertSizes) -> Shapes:
        wide, tall = (2 * sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)
        if self.transpose:
            wide, tall = wide[::-1], tall[::-1]
        return {self.gate_up: (sizes.experts, *wide), self.down: (sizes.experts, *tall)}

    def sources(self, prefix: str, expert: int, sizes: ExpertSizes) -> tuple[Source, Source, Source]:
        gate, up = (0, sizes.intermediate), (sizes.intermediate, 2 * sizes.intermediate)
        return (
            Source(prefix + self.gate_up, index=expert, rows=gate, transpose=self.transpose),
            Source(prefix + self.gate_up, index=expert, rows=up, transpose=self.transpose),
            Source(prefix + self.down, index=expert, transpose=self.transpose),
        )


@frozen
class StackedApart:
    """Three tensors: gate and up ``[E, I, H]``, down ``[E, H, I]``."""

    name: str
    gate: str
    up: str
    down: str
    block: str = "mlp."

    def tensors(self, sizes: ExpertSizes) -> Shapes:
        wide = (sizes.experts, sizes.intermediate, sizes.hidden)
        return {self.gate: wide, self.up: wide, self.down: (sizes.experts, sizes.hidden, sizes.intermediate)}

    def sources(self, prefix: str, expert: int, sizes: ExpertSizes) -> tuple[Source, Source, Source]:
        gate, up, down = (prefix + part for part in (self.gate, self.up, self.down))
        return Source(gate, index=expert), Source(up, index=expert), Source(down, index=expert)


ONE_EACH = OneEach("one-each", "mlp.", "gate_proj", "up_proj", "down_proj")
ONE_EACH_MIXTRAL = OneEach("one-each-mixtral", "block_sparse_moe.", "w1", "w3", "w2")

_GATE_UP, _GATE, _UP, _DOWN = (f"mlp.experts.{part}_proj" for part in ("gate_up", "gate", "up", "down"))

_ALL: tuple[ExpertLayout, ...] = (
    ONE_EACH,
    ONE_EACH_MIXTRAL,
    Stacked("stacked", _GATE_UP, _DOWN),
    Stacked("stacked-transposed", _GATE_UP, _DOWN, transpose=True),
    Stacked("stacked-weight", f"{_GATE_UP}.weight", f"{_DOWN}.weight"),
    StackedApart("stacked-apart", f"{_GATE}.weight", f"{_UP}.weight", f"{_DOWN}.weight"),
)

LAYOUTS: Mapping[str, ExpertLayout] = {layout.name: layout for layout in _ALL}
"""Every published form by name."""


def find_layout(index: CheckpointIndex, prefix: str, sizes: ExpertSizes, usual: ExpertLayout) -> ExpertLayout:
    """The layout that ``index`` shows under ``prefix``; ``usual`` where it shows none.

    A layout is recognised by the larger part of its tensors, so that a missing expert is reported as missing and not as
    another layout; two that differ in the order of axes are told apart by shape.
    """
    candidates = (usual, *(layout for layout in _ALL if layout is not usual))
    return max(candidates, key=lambda layout: _likeness(layout, index, prefix, sizes))


def _likeness(layout: ExpertLayout, index: CheckpointIndex, prefix: str, sizes: ExpertSizes) -> tuple[float, int]:
    """Which share of the layout's names is stored, and how many of those tensors have the layout's shape."""
    shapes = {prefix + name: shape for name, shape in layout.tensors(sizes).items()}
    stored = {name: index.tensors[name].shape for name in shapes if name in index.tensors}
    return len(stored) / len(shapes), sum(shape == shapes[name] for name, shape in stored.items())
