"""torch's own OpenMP runtime: a second pool of threads would fight with it over the same cores."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def library_path() -> Path | None:
    """The GNU OpenMP library that torch brought along; ``None`` where its build uses another. Imports no torch."""
    spec = find_spec("torch")
    places = [Path(p) for p in spec.submodule_search_locations or ()] if spec is not None else []
    folders = [folder for place in places for folder in (place / "lib", place.parent / "torch.libs")]
    return next((path for folder in folders for path in sorted(folder.glob("libgomp*.so*"))), None)


@cache
def runtime() -> ctypes.CDLL:
    """The library, loaded: the process gets the one that torch uses, since one file is loaded once."""
    path = library_path()
    if path is None:
        raise OSError("torch brought no GNU OpenMP library")
    return ctypes.CDLL(str(path))
