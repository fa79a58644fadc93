"""Do the stored tensors make the slots a family asks for? Decided from names and shapes, before any data is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import CheckpointIndex, Source, WeightSlot

EXPERT_PROJECTIONS = ("gate", "up", "down")


def source_shape(shape: tuple[int, ...], source: Source) -> tuple[int, ...]:
    """The logical shape of the piece that ``source`` takes from a tensor of ``shape``.

    In this order: ``index`` picks from the leading axis, ``transpose`` swaps the last two, ``rows`` cuts the leading
    axis of what is left, ``unpermute_heads`` reorders it. Raises ``ValueError`` saying which step does not fit.
    """
    if source.index is not None:
        if len(shape) < 2 or not 0 <= source.index < shape[0]:
            raise ValueError(f"entry {source.index} is asked of shape {_shown(shape)}")
        shape = shape[1:]
    if source.transpose:
        if len(shape) < 2:
            raise ValueError(f"shape {_shown(shape)} cannot be transposed")
        shape = (*shape[:-2], shape[-1], shape[-2])
    if source.rows is not None:
        first, stop = source.rows
        if not shape or not 0 <= first <= stop <= shape[0]:
            raise ValueError(f"rows {first} to {stop} are asked of shape {_shown(shape)}")
        shape = (stop - first, *shape[1:])
    if source.unpermute_heads and (not shape or shape[0] % (2 * source.unpermute_heads)):
        raise ValueError(f"shape {_shown(shape)} does not split into {source.unpermute_heads} heads")
    return shape


def slot_shapes(slot: WeightSlot) -> tuple[tuple[int, ...], ...]:
    """The shapes a slot's tensors have once stacked: one, or gate, up and down of an expert."""
    if slot.kind != "experts":
        return (slot.shape,)
    hidden, intermediate = slot.shape
    return (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)


def check_slots(
    index: CheckpointIndex,
    slots: Sequence[WeightSlot],
    *,
    ignored: Iterable[str] = (),
    formats: Collection[str] | None = None,
) -> None:
    """Raise ``CheckpointError`` unless ``index`` holds exactly what ``slots`` need, in the shapes they need.

    Refused: a missing tensor, a tensor nothing uses (unless a regular expression of ``ignored`` is found in its name),
    an entry of a stacked tensor that nothing uses, a shape that differs, and (where ``formats`` is given) a used tensor
    in another format. A ``dummy`` index fits everything.
    """
    if index.container == "dummy":
        return
    _check_present(index, slots)
    for slot in slots:
        _check_shapes(index, slot)
    _check_formats(index, slots, formats)
    _check_unused(index, slots, [re.compile(pattern) for pattern in ignored])


def _check_present(index: CheckpointIndex, slots: Sequence[WeightSlot]) -> None:
    missing = {s.tensor: slot.name for slot in slots for s in slot.sources if s.tensor not in index.tensors}
    if missing:
        tensor, slot_name = next(iter(missing.items()))
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"load {slot_name}",
            f"tensor {tensor}{more} is not in {_files(index)}",
            "download the checkpoint again, or convert it with a converter for this architecture",
        )


def _check_shapes(index: CheckpointIndex, slot: WeightSlot) -> None:
    pieces = [_piece(index, slot, source) for source in slot.sources]
    wanted = slot_shapes(slot)
    if slot.kind == "experts":
        if len(pieces) != len(wanted):
            raise CheckpointError(f"load {slot.name}", f"{len(pieces)} tensors make an expert, not {len(wanted)}")
        found = tuple(pieces)
    else:
        found = (_stacked(slot, pieces),)
    for shape, want in zip(found, wanted, strict=True):
        if shape != want:
            names = ", ".join(dict.fromkeys(s.tensor for s in slot.sources))
            raise CheckpointError(
                f"load {slot.name}",
                f"{names} in {index.tensors[slot.sources[0].tensor].file} gives {_shown(shape)}, "
                f"the configuration asks for {_shown(want)}",
                "use the configuration that belongs to these files",
            )


def _piece(index: CheckpointIndex, slot: WeightSlot, source: Source) -> tuple[int, ...]:
    info = index.tensors[source.tensor]
    try:
        return source_shape(info.shape, source)
    except ValueError as error:
        raise CheckpointError(
            f"load {slot.name}", f"{source.tensor} in {info.file}: {error}", "use the configuration of these files"
        ) from None


def _stacked(slot: WeightSlot, pieces: list[tuple[int, ...]]) -> tuple[int, ...]:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if any(not p or p[1:] != first[1:] for p in pieces):
        shapes = ", ".join(f"{s.tensor} {_shown(p)}" for s, p in zip(slot.sources, pieces, strict=True))
        raise CheckpointError(f"load {slot.name}", f"its tensors cannot be stacked: {shapes}")
    return (sum(p[0] for p in pieces), *first[1:])


def _check_formats(index: CheckpointIndex, slots: Sequence[WeightSlot], formats: Collection[str] | None) -> None:
    if formats is None:
        return
    for slot in slots:
        for source in slot.sources:
            info = index.tensors[source.tensor]
            if info.format not in formats:
                raise CheckpointError(
                    f"load {slot.name}",
                    f"{info.name} in {info.file} is stored as {info.format}, no weight",
                    f"known formats: {', '.join(sorted(formats))}",
                )


def _check_unused(index: CheckpointIndex, slots: Sequence[WeightSlot], ignored: Sequence[re.Pattern[str]]) -> None:
    used: dict[str, set[int] | None] = {}
    for slot in slots:
        for source in slot.sources:
            entries = used.setdefault(source.tensor, set())
            if source.index is None or entries is None:
                used[source.tensor] = None
            else:
                entries.add(source.index)
    extra = [n for n in index.tensors if n not in used and not any(p.search(n) for p in ignored)]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            "load the checkpoint's tensors",
            f"the model has no place for {extra[0]}{more} (in {index.tensors[extra[0]].file})",
            "use the configuration that belongs to these files",
        )
    for name, entries in used.items():
        info = index.tensors[name]
        if entries is not None and len(entries) != info.shape[0]:
            raise CheckpointError(
                "load the checkpoint's tensors",
                f"{name} in {info.file} holds {info.shape[0]} entries, the configuration uses {len(entries)}",
                "use the configuration that belongs to these files",
            )


def _files(index: CheckpointIndex) -> str:
    files = sorted({info.file for info in index.tensors.values()})
    return ", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "") or "any file"


def _shown(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
