"""Triton's disk cache as a folder: what is in it, and how to move it.

Triton files each kernel under a hash and keeps, beside its parts, a group file with their absolute paths. A folder that
was moved is therefore a cache of misses until those paths are written anew.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from pathlib import Path

GROUP_FILES = "__grp__*.json"


def cache_folder() -> Path:
    """Where Triton keeps its cache, as its own variables say; asked without importing it."""
    named = os.environ.get("TRITON_CACHE_DIR")
    if named:
        return Path(named)
    home = os.environ.get("TRITON_HOME")
    return (Path(home) if home else Path.home()) / ".triton" / "cache"


def folder_name(digest: str) -> str:
    """The folder of a kernel's hash (hexadecimal): base 32 without padding."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def on_disk(digests: Iterable[str], folder: Path | None = None) -> frozenset[str]:
    """Those hashes that the cache has a folder for."""
    where = folder if folder is not None else cache_folder()
    return frozenset(d for d in digests if d and (where / folder_name(d)).is_dir())


def relocate(folder: Path) -> int:
    """Make a cache that was copied or unpacked to ``folder`` valid there; returns how many group files were rewritten.

    Group files whose parts lie where they say are left alone, so this may be run at every start.
    """
    changed = 0
    for group in folder.glob(f"*/{GROUP_FILES}"):
        data = json.loads(group.read_text(encoding="utf-8"))
        paths = data.get("child_paths")
        if not isinstance(paths, dict):
            continue
        moved = {name: str(group.parent / Path(path).name) for name, path in paths.items()}
        if moved != paths:
            temporary = group.with_name(f".{group.name}.{os.getpid()}")
            temporary.write_text(json.dumps({**data, "child_paths": moved}), encoding="utf-8")
            temporary.replace(group)
            changed += 1
    return changed


MARK = "freetoken-relocatable"
"""A file that says of a cache folder where it lay when its paths were last right."""


def mark_relocatable(folder: Path) -> None:
    """Let a start that uses the folder find out for itself that it was moved."""
    (folder / MARK).write_text(str(folder.resolve()), encoding="utf-8")


def relocate_if_moved(folder: Path) -> int:
    """At a start: make the folder valid where it lies now, if it is marked and lay elsewhere before."""
    mark = folder / MARK
    if not mark.is_file() or mark.read_text(encoding="utf-8") == str(folder.resolve()):
        return 0
    changed = relocate(folder)
    mark_relocatable(folder)
    return changed
