"""What a checkpoint suggests for sampling, from ``generation_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from freetoken.vocab.errors import CheckpointError, UsageError
from freetoken.vocab.sampling import SamplingParams

_FILE = "generation_config.json"
_SAMPLING = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
}


@frozen
class GenerationDefaults:
    """``None`` where the checkpoint has no wish. Lengths (``max_new_tokens``, ``max_length``) are not taken over:
    they are examples, and a client that names none wants the answer whole.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_directory(cls, path: str | Path) -> GenerationDefaults:
        """Read ``generation_config.json``; without the file there are no wishes. ``CheckpointError`` on bad content."""
        file = Path(path) / _FILE
        if not file.is_file():
            return cls()
        try:
            return cls.from_config(json.loads(file.read_bytes()))
        except ValueError as error:
            raise CheckpointError(str(file), f"it is not valid JSON: {error}", "download the file again") from error

    @classmethod
    def from_config(cls, config: object) -> GenerationDefaults:
        """From the parsed file. ``do_sample: false`` means temperature 0; absent, it means nothing."""
        if not isinstance(config, Mapping):
            raise CheckpointError(_FILE, f"it holds {type(config).__name__}, not an object")
        wishes = {key: _number(config, key, kind) for key, kind in _SAMPLING.items()}
        sample = config.get("do_sample")
        if sample is not None and not isinstance(sample, bool):
            raise CheckpointError(f"{_FILE}: do_sample", f"it is {sample!r}, not true or false")
        if sample is False:
            wishes["temperature"] = 0.0
        _check_ranges(wishes)
        return cls(eos_token_ids=_token_ids(config.get("eos_token_id")), **wishes)  # type: ignore[arg-type]

    def sampling(self) -> dict[str, float | int]:
        """The wishes that are set, by their names in ``SamplingParams``."""
        return {key: value for key, value in asdict(self).items() if key in _SAMPLING and value is not None}


def _number(config: Mapping[str, object], key: str, kind: type[float] | type[int]) -> float | int | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise CheckpointError(f"{_FILE}: {key}", f"it is {value!r}, not a{'n integer' if kind is int else ' number'}")
    return kind(value)


def _token_ids(value: object) -> tuple[int, ...]:
    ids: list[Any] = [] if value is None else list(value) if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise CheckpointError(f"{_FILE}: eos_token_id", f"it is {value!r}, not a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _check_ranges(wishes: Mapping[str, float | int | None]) -> None:
    try:
        SamplingParams(**{key: value for key, value in wishes.items() if value is not None})  # type: ignore[arg-type]
    except UsageError as error:
        raise CheckpointError(f"{_FILE}: {error.refusal.asked}", error.refusal.found, error.refusal.fix) from error
