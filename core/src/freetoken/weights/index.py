"""Stored tensors matched with weight formats: each one's format, logical name and shape, and where its parts lie."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from attrs import frozen

from freetoken.plugin.specs import WeightFormatSpec
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import TensorInfo
from freetoken.weights.gguf import PLAIN_DTYPES, GGUFFile, GGUFTensor, type_name
from freetoken.weights.gguf_names import hf_names
from freetoken.weights.mapped_file import Extent
from freetoken.weights.safetensors_files import StoredPart


@frozen(eq=False)
class Entry:
    """One logical tensor: what is known of it, where its parts lie, and the name the file itself uses."""

    info: TensorInfo
    parts: Mapping[str, Extent]
    stored_name: str


def gguf_entries(gguf: GGUFFile, formats: Sequence[WeightFormatSpec]) -> dict[str, Entry]:
    """Entries by Hugging Face name, in file order.

    Raises ``CheckpointError`` naming tensor and file for a type no format reads, a row that is no whole number of
    blocks, and data beyond the end of the file.
    """
    by_type = {spec.ggml_type: spec for spec in formats if spec.ggml_type is not None}
    names = hf_names(gguf.tensors.keys())
    ordered = sorted((gguf.tensors[name] for name in names), key=lambda tensor: tensor.offset)
    entries: dict[str, Entry] = {}
    for tensor in ordered:
        spec = by_type.get(tensor.type)
        if spec is None:
            raise CheckpointError(
                f"read tensor {tensor.name} of {gguf.path}",
                f"it is stored as GGUF type {type_name(tensor.type)}, which no installed weight format reads",
                f"known formats: {_listed(by_type.values())}",
            )
        name = names[tensor.name]
        if name in entries:
            raise CheckpointError(
                f"read tensor {tensor.name} of {gguf.path}", f"it and {entries[name].stored_name} are both {name}"
            )
        entries[name] = _gguf_entry(gguf, tensor, spec, name)
    return entries


def _gguf_entry(gguf: GGUFFile, tensor: GGUFTensor, spec: WeightFormatSpec, name: str) -> Entry:
    asked = f"read tensor {tensor.name} of {gguf.path}"
    last = tensor.shape[-1] if tensor.shape else 1
    if last % spec.block:
        raise CheckpointError(
            asked, f"rows of {last} weights are no whole number of {spec.name} blocks of {spec.block}",
            "download the file again",
        )  # fmt: skip
    num_bytes = spec.num_bytes(tensor.shape)
    if tensor.offset + num_bytes > gguf.file.size_bytes:
        raise CheckpointError(
            asked,
            f"truncated: it ends at byte {tensor.offset + num_bytes}, the file has {gguf.file.size_bytes}",
            "download the file again",
        )
    plain = PLAIN_DTYPES.get(tensor.type)
    shape = tensor.shape if plain else (*tensor.shape[:-1], num_bytes // max(1, prod(tensor.shape[:-1])))
    extent = Extent(gguf.file, tensor.offset, num_bytes, plain or "uint8", shape)
    info = TensorInfo(name, spec.name, tensor.shape, num_bytes, str(gguf.path))
    return Entry(info, {"data": extent}, tensor.name)


def refuse_unknown_quantisation(
    quantisation: Mapping[str, object] | None, formats: Sequence[WeightFormatSpec], where: str
) -> tuple[WeightFormatSpec, ...]:
    """The formats that recognise a checkpoint's quantisation; none for a plain checkpoint.

    Raises ``CheckpointError`` naming the method and the known formats when it is quantised and no format knows how.
    """
    if quantisation is None:
        return ()
    active = tuple(spec for spec in formats if spec.detect is not None and spec.detect(quantisation))
    if not active:
        raise CheckpointError(
            f"load {where}",
            f"it is quantised with {quantisation_method(quantisation)}, which no installed weight format reads",
            f"use the unquantised checkpoint, or one in a known format: {_listed(formats)}",
        )
    return active


def quantisation_method(quantisation: Mapping[str, object]) -> str:
    """How people call the method of a ``quantization_config``."""
    method = quantisation.get("quant_method") or quantisation.get("quant_algo")
    detail = quantisation.get("quant_algo") or quantisation.get("format") or quantisation.get("fmt")
    bits = quantisation.get("bits") or quantisation.get("w_bit")
    extra = [str(detail)] if detail and detail != method else []
    extra += [f"{bits} bits"] if bits else []
    return f"{method or 'an unnamed method'}" + (f" ({', '.join(extra)})" if extra else "")


def safetensors_entries(
    stored: Mapping[str, StoredPart], formats: Sequence[WeightFormatSpec], active: Sequence[WeightFormatSpec]
) -> dict[str, Entry]:
    """Entries in file order: tensors of the ``active`` formats gathered from their parts, all others plain.

    A tensor of whole numbers keeps its dtype as format: it is no weight, and refused where a slot asks for it. A tensor
    of floats in a dtype no format reads raises ``CheckpointError`` naming tensor, file and dtype.
    """
    entries: dict[str, Entry] = {}
    gathered: set[str] = set()
    for spec in active:
        for base in _bases(stored, spec):
            names = {part: base + suffix for part, suffix in spec.parts.suffixes.items()}
            gathered.update(names.values())
            entries[base] = _gathered(base, {part: stored[name] for part, name in names.items()}, spec)
    plain = {spec.safetensors_dtype: spec for spec in formats if spec.safetensors_dtype}
    for name, part in stored.items():
        if name not in gathered:
            entries[name] = _plain_entry(name, part, plain)
    order = {name: at for at, name in enumerate(stored)}
    return dict(sorted(entries.items(), key=lambda item: order[item[1].stored_name]))


def _bases(stored: Mapping[str, StoredPart], spec: WeightFormatSpec) -> Iterable[str]:
    """The logical names whose every part is stored; a format with one unmarked part claims nothing by name."""
    marked = [suffix for suffix in spec.parts.suffixes.values() if suffix]
    if not marked:
        return
    for name in stored:
        base = name.removesuffix(marked[0])
        if base != name and all(base + suffix in stored for suffix in spec.parts.suffixes.values()):
            yield base


def _gathered(base: str, parts: Mapping[str, StoredPart], spec: WeightFormatSpec) -> Entry:
    shape = spec.parts.logical_shape({part: p.extent.shape for part, p in parts.items()})
    extents = {part: p.extent for part, p in parts.items()}
    first = next(iter(extents.values()))
    num_bytes = sum(extent.num_bytes for extent in extents.values())
    info = TensorInfo(base, spec.name, shape, num_bytes, str(first.file.path))
    return Entry(info, extents, base + next(iter(spec.parts.suffixes.values())))


def _plain_entry(name: str, part: StoredPart, plain: Mapping[str, WeightFormatSpec]) -> Entry:
    extent, spec = part.extent, plain.get(part.dtype)
    if spec is None and "F" in part.dtype:
        raise CheckpointError(
            f"read tensor {name} of {extent.file.path}",
            f"it is stored as {part.dtype}, which no installed weight format reads",
            f"known formats: {_listed(plain.values())}",
        )
    info = TensorInfo(name, spec.name if spec else extent.dtype, extent.shape, extent.num_bytes, str(extent.file.path))
    return Entry(info, {"data": extent}, name)


def quantisation_of(config: Mapping[str, object], modelopt: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """The quantisation a checkpoint declares: in ``config.json`` (or its ``text_config``), or ModelOpt's own file."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            found = holder.get(key)
            if found is not None:
                if not isinstance(found, dict):
                    raise CheckpointError("read config.json", f"{key} is {json.dumps(found)}, not an object")
                return found
    if modelopt is not None:
        inner = modelopt.get("quantization")
        return {"quant_method": "modelopt", **(inner if isinstance(inner, dict) else {})}
    return None


def _listed(formats: Iterable[WeightFormatSpec]) -> str:
    return ", ".join(sorted(spec.name for spec in formats)) or "none"
