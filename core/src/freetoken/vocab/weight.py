"""How weights travel from a checkpoint to the parts that compute with them.

A checkpoint yields ``StoredTensor`` values, each in a named weight format. A family lists ``WeightSlot`` values: what
the model needs and which stored tensors make it. The loader brings the two together, one slot in flight, and hands each
complete slot to the chosen kernel's ``pack``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from attrs import field, frozen

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class StoredTensor:
    """One tensor as it lies in a file. ``shape`` is the logical shape; ``parts`` hold what the format says they hold.

    A plain format has one part, ``"data"``. Parts may be views of a memory-mapped file: read-only, and valid only
    until the stream moves on unless cloned.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    parts: Mapping[str, Tensor]
    file: str


@frozen
class TensorInfo:
    """A stored tensor's name, format, logical shape and size on disk, known before any data is read."""

    name: str
    format: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str


@frozen
class Source:
    """A stored tensor, or a piece of it, that feeds a slot.

    ``index`` picks one entry of a leading expert axis; ``rows`` takes rows ``[start, stop)`` of what is left;
    ``unpermute_heads`` undoes the row order that GGUF's ``llama`` architecture gives to Q and K;
    ``transpose`` swaps the last two axes (plain formats only).
    """

    tensor: str
    index: int | None = None
    rows: tuple[int, int] | None = None
    unpermute_heads: int = 0
    transpose: bool = False


@frozen
class WeightSlot:
    """One parameter of the model.

    ``kind`` names the op that packs it: ``"linear"`` ([O, I]; several sources are stacked along O), ``"embedding"``
    ([V, H]), ``"vector"`` (any shape, kept in ``dtype`` or, where ``None``, the compute dtype) or ``"experts"`` (gate,
    up and down of one expert, in that order, handed to the MoE strategy). ``shape`` is the stacked logical shape and is
    checked; for experts it is ``(hidden, intermediate)``.
    """

    name: str
    kind: str
    sources: tuple[Source, ...]
    shape: tuple[int, ...]
    dtype: str | None = None
    layer: int | None = None
    expert: int | None = None
    add: float = 0.0  # added to a "vector" before it is cast, e.g. 1.0 for norms stored as an offset from one


@frozen
class CheckpointIndex:
    """What a family may know of the files when it lists its slots: the container and the tensors' names and shapes."""

    container: str  # "safetensors", "gguf" or "dummy"
    tensors: Mapping[str, TensorInfo] = field(factory=dict)

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()


class WeightRules(Protocol):
    """The slots of a model, in layer order, for the layout that ``index`` shows."""

    def __call__(self, index: CheckpointIndex) -> tuple[WeightSlot, ...]: ...
