"""JSON files of a checkpoint: an object, or a ``CheckpointError`` that names the file."""

from __future__ import annotations

import json
from pathlib import Path

from freetoken.vocab.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, object]:
    """The object in ``path``; ``CheckpointError`` when it cannot be read, is not UTF-8, not JSON or not an object."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"read {path}", error.strerror or str(error), "check the path and permissions") from None
    return parse_json_object(raw, str(path))


def parse_json_object(raw: bytes, what: str) -> dict[str, object]:
    """The object in ``raw``; errors name ``what``."""
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise CheckpointError(f"read {what}", f"not UTF-8 at byte {error.start}", "download the file again") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"read {what}",
            f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            "download the file again",
        ) from None
    except (RecursionError, ValueError) as error:  # nested too deep, or a number too long for Python to read
        raise CheckpointError(f"read {what}", f"not usable JSON: {error}", "download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"read {what}", f"a {type(value).__name__}, not an object", "download the file again")
    return value
