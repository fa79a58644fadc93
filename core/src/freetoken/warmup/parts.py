"""The parts of a planned model as a launch space sees them: each layer's ops, its attention, the head on its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from attrs import frozen

from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launch, Launches, StepPoint
from freetoken.vocab.ops import OpShape
from freetoken.warmup.launch_space import Part

HEAD = "head"
LAYER = "layers."


class _RowsAsTokens:
    """A step as the head sees it: its tokens are the rows that need logits, one a sequence."""

    __slots__ = ("_point",)

    def __init__(self, point: StepPoint) -> None:
        self._point = point

    def __getattr__(self, name: str) -> object:
        return getattr(self._point, "rows" if name in ("tokens", "sequences") else name)


@frozen
class OnRows:
    """The launch function of an op of the head, which gets rows of logits where layers get tokens."""

    function: Launches
    counts: str = "rows"

    def __call__(self, point: StepPoint, shape: OpShape, device: Device) -> tuple[Launch, ...]:
        return self.function(cast(StepPoint, _RowsAsTokens(point)), shape, device)


def model_parts(
    parts: Sequence[tuple[str, Sequence[OpShape]]],
    launches: Mapping[OpShape, Launches | None],
    attention: Mapping[int, tuple[OpShape, Launches | None]],
) -> tuple[Part, ...]:
    """The parts of a launch space.

    ``parts`` are the family's, ``launches`` the chosen kernels' by shape (shapes that no kernel was chosen for are left
    out), ``attention`` each layer's attention shape and its backend's launches.
    """
    made = []
    for name, shapes in parts:
        ops = [(shape, _for_part(name, launches[shape])) for shape in shapes if shape in launches]
        index = layer_of(name)
        if index is not None and index in attention:
            ops.append(attention[index])
        made.append((name, tuple(ops)))
    return tuple(made)


def _for_part(name: str, function: Launches | None) -> Launches | None:
    return OnRows(function) if name == HEAD and function is not None else function


def layer_of(part: str) -> int | None:
    """The index of the layer that a part is; ``None`` for the embedding and the head."""
    return int(part.removeprefix(LAYER)) if part.startswith(LAYER) else None
