"""Safetensors checkpoints: the headers of one file or many, read and checked without touching the data.

A file is: the header's length (8 bytes, little-endian), the header (JSON: name → dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TypeGuard

from attrs import frozen

from freetoken.vocab.errors import CheckpointError
from freetoken.weights.json_files import parse_json_object, read_json_object
from freetoken.weights.mapped_file import Extent, MappedFile

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_HEADER_BYTES = 100_000_000

# Element types by the file format's names: torch's name and the size in bytes.
_DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U64": ("uint64", 8),
    "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1), "BOOL": ("bool", 1), "C64": ("complex64", 8),
}  # fmt: skip


@frozen(eq=False)
class StoredPart:
    """One tensor of a file: the file format's name of its dtype, and where it lies."""

    dtype: str
    extent: Extent


def safetensors_parts(folder: Path) -> dict[str, StoredPart]:
    """Every tensor of the checkpoint in ``folder``, by name, in file order.

    Raises ``CheckpointError`` for a missing or truncated file, a tensor the index lists but the file lacks, a folder
    without safetensors, and pickles.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return _indexed(folder, index)
    single = folder / SINGLE_NAME
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if len(files) > 1:
        raise CheckpointError(
            f"read the checkpoint in {folder}",
            f"{len(files)} safetensors files and no {INDEX_NAME} to say how they belong together",
            f"add the {INDEX_NAME} that was published with them",
        )
    if not files:
        raise _nothing_to_read(folder)
    return dict(_file_parts(MappedFile(files[0])))


def _nothing_to_read(folder: Path) -> CheckpointError:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return CheckpointError(
            f"read the checkpoint in {folder}",
            f"a pickle checkpoint ({pickles[0]}): reading it could run any code",
            "convert to safetensors, or use the safetensors files of the same model",
        )
    return CheckpointError(
        f"read the checkpoint in {folder}", f"no {SINGLE_NAME} and no {INDEX_NAME}", "download the weights too"
    )


def _indexed(folder: Path, index: Path) -> dict[str, StoredPart]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"read {index}", "it has no weight_map", "download the file again")
    parts: dict[str, StoredPart] = {}
    for name in dict.fromkeys(_shard_names(index, weight_map)):
        path = folder / name
        listed = [tensor for tensor, file in weight_map.items() if file == name]
        if not path.exists():
            raise CheckpointError(
                f"read tensor {listed[0]} of {folder}",
                f"{INDEX_NAME} says it is in {name}, and that file is missing",
                "download the missing file",
            )
        found = dict(_file_parts(MappedFile(path)))
        for tensor in listed:
            if tensor not in found:
                raise CheckpointError(
                    f"read tensor {tensor} of {folder}",
                    f"{INDEX_NAME} says it is in {name}, but that file has no such tensor",
                    "download both files again",
                )
        # What the index does not list is part of the model all the same; where it names another file, that one holds.
        parts.update({tensor: part for tensor, part in found.items() if weight_map.get(tensor, name) == name})
    return parts


def _shard_names(index: Path, weight_map: Mapping[object, object]) -> Iterator[str]:
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
            raise CheckpointError(
                f"read {index}", f"tensor {tensor} is said to be in {file!r}, which is no file of this folder",
                "download the file again",
            )  # fmt: skip
        yield file


def _file_parts(file: MappedFile) -> Iterator[tuple[str, StoredPart]]:
    header, data_start = _header(file)
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    parts = [(name, _part(file, name, entry, data_start)) for name, entry in entries]
    yield from sorted(parts, key=lambda item: item[1].extent.start)


def _header(file: MappedFile) -> tuple[dict[str, object], int]:
    if file.size_bytes < 8:
        raise _damaged(file, f"{file.size_bytes} bytes are too few for a header")
    length = int.from_bytes(file.buffer[:8], "little")
    if length > min(MAX_HEADER_BYTES, file.size_bytes - 8):
        raise _damaged(file, f"truncated, or no safetensors file: a header of {length} bytes in {file.size_bytes}")
    return parse_json_object(file.buffer[8 : 8 + length], f"the header of {file.path}"), 8 + length


def _damaged(file: MappedFile, found: str, name: str = "") -> CheckpointError:
    asked = f"read tensor {name} of {file.path}" if name else f"read {file.path} as safetensors"
    return CheckpointError(asked, found, "download the file again")


def _part(file: MappedFile, name: str, entry: object, data_start: int) -> StoredPart:
    if not isinstance(entry, dict):
        raise _damaged(file, "its header entry is no object", name)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _damaged(file, f"dtype {json.dumps(dtype)}; known: {', '.join(_DTYPES)}", name)
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise _damaged(file, f"shape {json.dumps(shape)} and data_offsets {json.dumps(offsets)} make no tensor", name)
    torch_name, itemsize = _DTYPES[dtype]
    first, stop = offsets
    if stop - first != prod(shape) * itemsize:
        raise _damaged(
            file, f"{dtype} {shape} needs {prod(shape) * itemsize} bytes, the header gives {stop - first}", name
        )
    if data_start + stop > file.size_bytes:
        raise _damaged(file, f"truncated: it ends at byte {data_start + stop}, the file has {file.size_bytes}", name)
    return StoredPart(dtype, Extent(file, data_start + first, stop - first, torch_name, tuple(shape)))


def _whole_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
