"""A checkpoint: a model's configuration, the index of its tensors, and the way to read them.

Opening reads headers and JSON only and imports no torch; ``read`` and ``codec`` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

from attrs import field, frozen

from freetoken.plugin.specs import WeightCodec, WeightFormatSpec
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import CheckpointIndex, StoredTensor
from freetoken.weights.gguf import GGUFFile
from freetoken.weights.gguf_config import config_from_gguf
from freetoken.weights.index import (
    Entry,
    gguf_entries,
    quantisation_of,
    refuse_unknown_quantisation,
    safetensors_entries,
)
from freetoken.weights.json_files import read_json_object
from freetoken.weights.safetensors_files import safetensors_parts

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip


@frozen
class TokenizerSource:
    """What a tokenizer can be made from: the checkpoint's files by name, or a GGUF file's metadata."""

    files: Mapping[str, Path] = field(factory=dict)
    gguf: Mapping[str, object] | None = None


class Checkpoint:
    """An opened model source.

    ``kind`` is ``"safetensors"``, ``"gguf"`` or ``"dummy"`` (a configuration without weights). ``config`` holds the
    keys of Hugging Face's ``config.json`` whatever the container. ``architectures`` are the names a family is found by;
    for GGUF that is ``gguf_architecture`` instead. ``index`` lists tensors under Hugging Face names, in file order.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        config: Mapping[str, object],
        entries: Mapping[str, Entry],
        formats: Sequence[WeightFormatSpec],
        tokenizer: TokenizerSource,
        generation_config: Mapping[str, object],
    ) -> None:
        self.path, self.kind, self.tokenizer = path, kind, tokenizer
        self.config = MappingProxyType(dict(config))
        self.generation_config = MappingProxyType(dict(generation_config))
        self.entries: Mapping[str, Entry] = entries
        self.index = CheckpointIndex(kind, MappingProxyType({name: e.info for name, e in entries.items()}))
        self._formats = {spec.name: spec for spec in formats}
        self._codecs: dict[str, WeightCodec] = {}

    @property
    def architectures(self) -> tuple[str, ...]:
        names = self.config.get("architectures")
        return tuple(n for n in names if isinstance(n, str)) if isinstance(names, list | tuple) else ()

    @property
    def gguf_architecture(self) -> str:
        """llama.cpp's word for the architecture; empty where the checkpoint is no GGUF file."""
        return str(self.config.get("gguf_architecture", ""))

    @property
    def format_names(self) -> tuple[str, ...]:
        """The formats this checkpoint was opened with."""
        return tuple(self._formats)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.info.num_bytes for entry in self.entries.values())

    def read(self, name: str) -> StoredTensor:
        """The tensor as views of the mapped file; ``CheckpointError`` when there is none of that name."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"read tensor {name} of {self.path}", "the checkpoint has no such tensor")
        parts = {part: extent.tensor() for part, extent in entry.parts.items()}
        return StoredTensor(name, entry.info.format, entry.info.shape, parts, entry.info.file)

    def codec(self, format_name: str) -> WeightCodec:
        """The arithmetic of a format, made once; ``CheckpointError`` for one the checkpoint was not opened with."""
        if format_name not in self._codecs:
            if format_name not in self._formats:
                raise CheckpointError(
                    f"read a tensor stored as {format_name}", "that is no weight format",
                    f"known formats: {', '.join(sorted(self._formats))}",
                )  # fmt: skip
            self._codecs[format_name] = self._formats[format_name].codec()
        return self._codecs[format_name]

    def close(self) -> None:
        """Forget the files. Tensors still held keep their mapping alive; the rest is unmapped with this object."""
        self.entries = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: Path, formats: Sequence[WeightFormatSpec], *, dummy: bool = False) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory.

    With ``dummy`` only the configuration is read and the index is empty. Raises ``CheckpointError``, before anything is
    allocated, for missing, damaged or unsafe files and for quantisation that none of ``formats`` reads.
    """
    return _open_gguf(path, formats, dummy) if path.is_file() else _open_folder(path, formats, dummy)


def _open_gguf(path: Path, formats: Sequence[WeightFormatSpec], dummy: bool) -> Checkpoint:
    gguf = GGUFFile(path)
    config = config_from_gguf(gguf)
    entries = {} if dummy else gguf_entries(gguf, formats)
    tokenizer = TokenizerSource(gguf=gguf.metadata)
    return Checkpoint(path, "dummy" if dummy else "gguf", config, entries, formats, tokenizer, {})


def _open_folder(path: Path, formats: Sequence[WeightFormatSpec], dummy: bool) -> Checkpoint:
    config_path = path / "config.json"
    if not config_path.exists():
        raise CheckpointError(
            f"open the model in {path}", "it has no config.json", "give a Hugging Face model directory or a .gguf file"
        )
    config = read_json_object(config_path)
    modelopt = path / "hf_quant_config.json"
    quantisation = quantisation_of(config, read_json_object(modelopt) if modelopt.exists() else None)
    # Dummy weights are plain whatever the files would be, so that a quantised model's shapes can be tried out.
    active = () if dummy else refuse_unknown_quantisation(quantisation, formats, str(path))
    entries = {} if dummy else safetensors_entries(safetensors_parts(path), formats, active)
    generation = path / "generation_config.json"
    files = {name: path / name for name in TOKENIZER_FILES if (path / name).exists()}
    return Checkpoint(
        path,
        "dummy" if dummy else "safetensors",
        config,
        entries,
        formats,
        TokenizerSource(files=files),
        read_json_object(generation) if generation.exists() else {},
    )
