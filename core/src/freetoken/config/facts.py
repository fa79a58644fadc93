"""What planning knows of a checkpoint, and the op shapes its weights call for. Pure: names and sizes, no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from attrs import evolve, frozen

from freetoken.plugin.catalog import Catalog
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.model_spec import ModelSpec
from freetoken.vocab.ops import OPS, OpShape
from freetoken.vocab.weight import CheckpointIndex, WeightSlot

SLOT_OPS = {"linear": "linear", "embedding": "embedding", "experts": "experts"}


@frozen
class CheckpointFacts:
    """A checkpoint as planning sees it: its configuration, architectures and the index of its tensors."""

    path: str
    short_name: str
    config: Mapping[str, object]
    architectures: tuple[str, ...]
    index: CheckpointIndex
    dtype: str  # what most of its weights would be computed in: float32, bfloat16 or float16


@frozen
class WeightNeeds:
    """The slots of a model and the op shape, with weight formats, that each packed slot calls for."""

    slots: tuple[WeightSlot, ...]
    shapes: Mapping[str, OpShape]  # slot name → shape, for the slots that a kernel packs
    parts: tuple[tuple[str, tuple[OpShape, ...]], ...]  # the family's parts, weight shapes with formats filled in


def find_family(families: Catalog[ModelFamilySpec], facts: CheckpointFacts) -> ModelFamilySpec:
    """The family that serves one of the checkpoint's architectures; ``CheckpointError`` lists those that are served."""
    for spec in families:
        if set(facts.architectures) & {*spec.architectures, *spec.gguf_architectures}:
            return spec
    served = sorted({name for spec in families for name in spec.architectures})
    asked = f"{facts.path}: architecture {' / '.join(facts.architectures) or '(none named)'}"
    raise CheckpointError(
        asked, f"no installed plugin serves it; served: {', '.join(served)}", "see `freetoken models`"
    )


def weight_needs(family: ModelFamilySpec, spec: ModelSpec, facts: CheckpointFacts, dtype: str) -> WeightNeeds:
    """Slots with their shapes. Raises ``CheckpointError`` for a tensor that the files do not have."""
    slots = family.weights(spec, facts.index)
    shapes = {slot.name: _slot_shape(slot, spec, facts, dtype) for slot in slots if slot.kind in SLOT_OPS}
    parts = tuple(
        (part, tuple(_with_formats(shape, part, slots, shapes) for shape in op_shapes))
        for part, op_shapes in family.op_shapes(spec, dtype)
    )
    return WeightNeeds(slots, shapes, parts)


def source_formats(slot: WeightSlot, facts: CheckpointFacts, dtype: str) -> tuple[str, ...]:
    """The weight formats of a slot's sources, in order, each once; dummy weights are plain in the compute dtype."""
    if facts.index.container == "dummy":
        return (dtype,)
    formats = []
    for source in slot.sources:
        info = facts.index.tensors.get(source.tensor)
        if info is None:
            raise CheckpointError(
                f"{facts.path}: {source.tensor}", f"the files do not hold this tensor, which {slot.name} needs",
                "the download may be incomplete",
            )  # fmt: skip
        formats.append(info.format)
    return tuple(dict.fromkeys(formats))


def _slot_shape(slot: WeightSlot, spec: ModelSpec, facts: CheckpointFacts, dtype: str) -> OpShape:
    formats = source_formats(slot, facts, dtype)
    if slot.kind == "experts":
        assert spec.moe is not None, "a family lists expert slots only for a model with experts"
        hidden, intermediate = slot.shape
        return OpShape(
            "experts", dtype, cols=hidden, intermediate=intermediate, experts=spec.moe.experts, top_k=spec.moe.top_k,
            formats=formats,
        )  # fmt: skip
    rows, cols = slot.shape
    return OpShape(SLOT_OPS[slot.kind], dtype, rows=rows, cols=cols, formats=formats)


def _with_formats(shape: OpShape, part: str, slots: Sequence[WeightSlot], shapes: Mapping[str, OpShape]) -> OpShape:
    """The family's bare weight shape with the formats of the slot of the same sizes in the same part."""
    if not OPS[shape.op].weights:
        return shape
    in_part = [s for s in slots if s.name in shapes and s.name.startswith(f"{part}.")] or list(slots)
    for slot in in_part:
        full = shapes.get(slot.name)
        if full is not None and evolve(full, formats=()) == evolve(shape, formats=()):
            return full
    return shape


def dummy_parameter_bytes(slots: Sequence[WeightSlot], itemsize: int) -> int:
    """Bytes of all parameters if each were stored plainly."""
    return sum((3 if s.kind == "experts" else 1) * prod(s.shape) * itemsize for s in slots)
