"""A GGUF file's header: metadata and tensor infos, read in one pass (GGUF specification, versions 2 and 3).

Opening costs a walk over the header's bytes; long lists of strings are skipped over and decoded when first used. Data
is never touched here.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import overload

from attrs import frozen

from freetoken.vocab.errors import CheckpointError
from freetoken.weights.mapped_file import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_DIMENSIONS = 8
MAX_NESTING = 4

# The numbers GGUF gives to tensor types, for messages; which of them can be computed with is up to the weight formats.
TYPE_NAMES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

# Tensor types whose elements torch can view as they are; all others are rows of packed bytes.
PLAIN_DTYPES: Mapping[int, str] = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16",
}  # fmt: skip

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@frozen
class GGUFTensor:
    """One tensor's header entry: ``shape`` is logical, slowest axis first; ``offset`` counts from the file's start."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int


class Strings(Sequence[str]):
    """An array of strings, kept as the file's bytes and decoded on first use.

    Using it raises ``CheckpointError`` naming ``what`` it is when a string is not UTF-8.
    """

    def __init__(self, raw: bytes, count: int, what: str) -> None:
        self._raw, self._count, self._what = raw, count, what
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._strings()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._strings())

    def __repr__(self) -> str:
        return f"<{self._count} strings>"

    def _strings(self) -> list[str]:
        if self._decoded is None:
            try:
                self._decoded = self._decode()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"read {self._what}", f"not UTF-8: {error}", "download the file again") from None
        return self._decoded

    def _decode(self) -> list[str]:
        raw, at, length_at, out = self._raw, 0, struct.Struct("<Q").unpack_from, []
        for _ in range(self._count):
            stop = at + 8 + length_at(raw, at)[0]
            out.append(raw[at + 8 : stop].decode())
            at = stop
        return out


class GGUFFile:
    """An opened GGUF file: ``metadata`` by key, ``tensors`` by the file's own names in file order, ``file`` for data.

    Raises ``CheckpointError`` naming the file (and the key or tensor) for a wrong magic, an unsupported version, a
    header that ends early, and values that cannot be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        cursor = _Cursor(self.file)
        self.version, tensor_count, key_count = _preamble(cursor)
        metadata: dict[str, object] = {}
        for _ in range(key_count):
            key = cursor.text("a metadata key")
            if key in metadata:
                raise cursor.corrupt(f"metadata key {key} appears twice")
            metadata[key] = cursor.value(cursor.number("I"), key)
        self.metadata: Mapping[str, object] = MappingProxyType(metadata)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise cursor.corrupt(f"general.alignment is {alignment!r}")
        infos = [cursor.tensor() for _ in range(tensor_count)]
        data = cursor.at + -cursor.at % alignment
        self.tensors = MappingProxyType(self._placed(infos, data, alignment, cursor))

    def _placed(self, infos: list[GGUFTensor], data: int, alignment: int, cursor: _Cursor) -> dict[str, GGUFTensor]:
        placed: dict[str, GGUFTensor] = {}
        for info in infos:
            if info.name in placed:
                raise cursor.corrupt(f"tensor {info.name} appears twice")
            if info.offset % alignment:
                raise cursor.corrupt(f"tensor {info.name} starts at {info.offset}, not a multiple of {alignment}")
            placed[info.name] = GGUFTensor(info.name, info.type, info.shape, data + info.offset)
        return placed


def type_name(number: int) -> str:
    """The type's name as people know it."""
    return TYPE_NAMES.get(number, f"number {number}")


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise CheckpointError(
            f"read {cursor.path} as GGUF",
            f"it starts with {magic!r}, not {MAGIC!r}",
            "give a .gguf file; other formats must be converted first",
        )
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise CheckpointError(
            f"read {cursor.path} as GGUF",
            "it is big-endian" if swapped else f"it is version {version}; versions 2 and 3 are read",
            "convert the model again with a current converter",
        )
    return version, cursor.number("Q"), cursor.number("Q")


class _Cursor:
    """A position in the header; every step forward is checked against the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.path, self._buffer, self._end, self.at = file.path, file.buffer, file.size_bytes, 0

    def corrupt(self, found: str) -> CheckpointError:
        return CheckpointError(f"read {self.path} as GGUF", f"corrupt header: {found}", "download the file again")

    def _require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._end - self.at:
            raise CheckpointError(
                f"read {self.path} as GGUF",
                f"truncated header: {what} needs {num_bytes} bytes at {self.at}, the file has {self._end} in all",
                "download the file again",
            )

    def take(self, num_bytes: int, what: str) -> bytes:
        self._require(num_bytes, what)
        self.at += num_bytes
        return self._buffer[self.at - num_bytes : self.at]

    def number(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), "a number"))[0]
        return value

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.corrupt(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def value(self, kind: int, key: str, depth: int = 0) -> object:
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise self.corrupt(f"{key} has value type {kind}, which does not exist")
        value = self.number(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def _array(self, key: str, depth: int) -> object:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self._strings(key, count)
        if kind == _ARRAY:
            if depth == MAX_NESTING:
                raise self.corrupt(f"{key} is nested more than {MAX_NESTING} deep")
            self._require(12 * count, key)
            return [self._array(key, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.corrupt(f"{key} has elements of type {kind}, which does not exist")
        raw = self.take(count * struct.calcsize("<" + _SCALARS[kind]), key)
        if kind == _BOOL:
            return [bool(byte) for byte in raw]
        return array(_SCALARS[kind], raw)

    def _strings(self, key: str, count: int) -> Strings:
        self._require(8 * count, key)
        start, at, last = self.at, self.at, self._end - 8
        buffer, length_at = self._buffer, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                self._require(at + 8 - start, key)
            at += 8 + length_at(buffer, at)[0]
        return Strings(self.take(at - start, key), count, f"{key} in {self.path}")

    def tensor(self) -> GGUFTensor:
        name = self.text("a tensor's name")
        dimensions = self.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise self.corrupt(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return GGUFTensor(name, self.number("I"), shape, self.number("Q"))
