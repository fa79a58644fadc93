"""How checkpoints keep experts: a tensor each, or stacked, in every published form."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from freetoken.vocab.weight import CheckpointIndex, Source


@frozen
class ExpertSizes:
    """``experts`` of ``gate``, ``up [I, H]`` and ``down [H, I]``."""

    experts: int
    hidden: int
    intermediate: int


@frozen
class ExpertLayout:
    """One form. ``block`` is the prefix of the router and of a shared expert; ``tensors(sizes)`` gives the stored names, after the layer's prefix, with their shapes;
    ``sources(prefix, expert, sizes)`` says where one expert's gate, up and down are."""

    name: str
    block: str
    tensors: Callable[[ExpertSizes], Mapping[str, tuple[int, ...]]]
    sources: Callable[[str, int, ExpertSizes], tuple[Source, Source, Source]]


def find_layout(index: CheckpointIndex, prefix: str, sizes: ExpertSizes, usual: ExpertLayout) -> ExpertLayout:
    """The layout that ``index`` shows under ``prefix``; ``usual`` where it shows none.

    A layout is recognised by the larger part of its tensors, so that a missing expert is reported as missing and not as
    another layout; two that differ in the order of axes are told apart by shape.
    """
    candidates = (usual, *(layout for layout in LAYOUTS.values() if layout is not usual))
    return max(candidates, key=lambda layout: _likeness(layout, index, prefix, sizes))


def _likeness(layout: ExpertLayout, index: CheckpointIndex, prefix: str, sizes: ExpertSizes) -> tuple[bool, float]:
    """Whether the stored tensors of these names have the layout's shapes, and which share of the names is stored."""
    shapes = {prefix + name: shape for name, shape in layout.tensors(sizes).items()}
    stored = {name: index.tensors[name].shape for name in shapes if name in index.tensors}
    return all(shape == shapes[name] for name, shape in stored.items()), len(stored) / len(shapes)


def _one_each(name: str, block: str, gate: str, up: str, down: str) -> ExpertLayout:
    """A tensor for each matrix of each expert: gate and up ``[I, H]``, down ``[H, I]``."""

    def stored(expert: int, part: str) -> str:
        return f"{block}experts.{expert}.{part}.weight"

    def tensors(s: ExpertSizes) -> Mapping[str, tuple[int, ...]]:
        wide, tall = (s.intermediate, s.hidden), (s.hidden, s.intermediate)
        shapes = ((gate, wide), (up, wide), (down, tall))
        return {stored(e, part): shape for e in range(s.experts) for part, shape in shapes}

    def sources(prefix: str, expert: int, _: ExpertSizes) -> tuple[Source, Source, Source]:
        return (
            Source(prefix + stored(expert, gate)),
            Source(prefix + stored(expert, up)),
            Source(prefix + stored(expert, down)),
        )

    return ExpertLayout(name, block, tensors, sources)


def _stacked(name: str, gate_up: str, down: str, transpose: bool) -> ExpertLayout:
    """Gate and up in one tensor ``[E, 2I, H]`` and down ``[E, H, I]``; transposed, ``[E, H, 2I]`` and ``[E, I, H]``."""

    def tensors(s: ExpertSizes) -> Mapping[str, tuple[int, ...]]:
        wide, tall = (2 * s.intermediate, s.hidden), (s.hidden, s.intermediate)
        if transpose:
            wide, tall = wide[::-1], tall[::-1]
        return {gate_up: (s.experts, *wide), down: (s.experts, *tall)}

    def sources(prefix: str, expert: int, s: ExpertSizes) -> tuple[Source, Source, Source]:
        size = s.intermediate
        return (
            Source(prefix + gate_up, index=expert, rows=(0, size), transpose=transpose),
            Source(prefix + gate_up, index=expert, rows=(size, 2 * size), transpose=transpose),
            Source(prefix + down, index=expert, transpose=transpose),
        )

    return ExpertLayout(name, "mlp.", tensors, sources)


def _stacked_apart(name: str, gate: str, up: str, down: str) -> ExpertLayout:
    """Three tensors: gate and up ``[E, I, H]``, down ``[E, H, I]``."""

    def tensors(s: ExpertSizes) -> Mapping[str, tuple[int, ...]]:
        wide, tall = (s.experts, s.intermediate, s.hidden), (s.experts, s.hidden, s.intermediate)
        return {gate: wide, up: wide, down: tall}

    def sources(prefix: str, expert: int, _: ExpertSizes) -> tuple[Source, Source, Source]:
        return (
            Source(prefix + gate, index=expert),
            Source(prefix + up, index=expert),
            Source(prefix + down, index=expert),
        )

    return ExpertLayout(name, "mlp.", tensors, sources)


ONE_EACH = _one_each("one-each", "mlp.", "gate_proj", "up_proj", "down_proj")
ONE_EACH_MIXTRAL = _one_each("one-each-mixtral", "block_sparse_moe.", "w1", "w3", "w2")

LAYOUTS: Mapping[str, ExpertLayout] = {
    layout.name: layout
    for layout in (
        ONE_EACH,
        ONE_EACH_MIXTRAL,
        _stacked("stacked", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", transpose=False),
        _stacked("stacked-transposed", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", transpose=True),
        _stacked("stacked-weight", "mlp.experts.gate_up_proj.weight", "mlp.experts.down_proj.weight", transpose=False),
        _stacked_apart(
            "stacked-apart",
            "mlp.experts.gate_proj.weight",
            "mlp.experts.up_proj.weight",
            "mlp.experts.down_proj.weight",
        ),
    )
}
"""Every published form by name."""
