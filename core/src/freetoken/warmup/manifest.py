"""The manifest: what one start left for the next, in a file of the cache folder named after its fingerprint.

Files are replaced in one step, so that two servers may start on one folder at once: each reads a whole one or none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from freetoken.vocab.launch import StepPoint
from freetoken.vocab.warmup import Known
from freetoken.warmup.fingerprint import Fingerprint
from freetoken.warmup.survey import Survey
from freetoken.warmup.survey_json import point_from_json, point_to_json, survey_from_json, survey_to_json

_log = logging.getLogger("freetoken.warmup")

FORMAT = 1
FOLDER = "warmup"
MOST_LATE = 100
MOST_MANIFESTS = 50
"""More in one folder are of versions and options long gone; the oldest are deleted."""


@frozen
class LateNote:
    """A step at which production met something, and what, in words."""

    point: StepPoint
    events: tuple[str, ...]


@frozen
class Manifest:
    """What a start found, compiled and proved.

    ``compiled`` maps each key to the hash that Triton's disk cache files it under. ``proven`` says that a whole warmup
    went through. ``seconds`` are of the warmup that wrote it, by phase and by kernel. ``certificate`` is what
    ``freetoken warmup verify`` found.
    """

    fingerprint: Fingerprint
    model: str = ""
    written: str = ""
    survey: Survey | None = None
    compiled: Mapping[str, str] = field(factory=dict)
    proven: bool = False
    late: tuple[LateNote, ...] = ()
    seconds: Mapping[str, float] = field(factory=dict)
    kernel_seconds: Mapping[str, float] = field(factory=dict)
    certificate: Mapping[str, Any] | None = None

    def known(self, on_disk: frozenset[str] | None = None) -> Known:
        """A policy's view. ``on_disk`` are the hashes that are really in Triton's cache; ``None`` trusts them all."""
        keys = frozenset(k for k, h in self.compiled.items() if on_disk is None or not h or h in on_disk)
        lost = len(self.compiled) - len(keys)
        because = f"manifest of {self.written}, {len(keys)} keys"
        if lost:
            because += f"; {lost} more are gone from Triton's cache"
        return Known(
            compiled=keys,
            proven=self.proven and not lost,
            late=tuple(dict.fromkeys(note.point for note in self.late)),
            because=because,
        )


@frozen
class Found:
    """A manifest, or ``None`` and why."""

    manifest: Manifest | None
    because: str


class ManifestStore:
    """The manifests of one cache folder."""

    def __init__(self, cache_dir: Path) -> None:
        self.folder = cache_dir / FOLDER

    def path(self, model: str, fingerprint: Fingerprint) -> Path:
        plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in model)
        return self.folder / f"{plain}-{fingerprint.digest[:16]}.json"

    def find(self, model: str, fingerprint: Fingerprint) -> Found:
        """The manifest of this fingerprint. A damaged or foreign one is left alone and named in the reason."""
        path = self.path(model, fingerprint)
        if not path.exists():
            return Found(None, self._nearest(model, fingerprint))
        found = read_manifest(path)
        if found.manifest is not None and found.manifest.fingerprint != fingerprint:
            changed = "; ".join(fingerprint.differences(found.manifest.fingerprint)[:3])
            return Found(None, f"{path.name} is of another start ({changed}) and is ignored")
        return found

    def _nearest(self, model: str, fingerprint: Fingerprint) -> str:
        """Why there is none: nothing for this model yet, or what changed since the newest one."""
        others = [f.manifest for f in map(read_manifest, self.paths()) if f.manifest is not None]
        same = [m for m in others if m.model == model]
        if not same:
            return "no manifest yet"
        newest = max(same, key=lambda m: m.written)
        changed = fingerprint.differences(newest.fingerprint)
        more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
        return f"no manifest for this: since {newest.written} changed {'; '.join(changed[:2])}{more}"

    def paths(self) -> tuple[Path, ...]:
        return tuple(sorted(self.folder.glob("*.json"))) if self.folder.is_dir() else ()

    def write(self, manifest: Manifest) -> Path:
        """Replace the file in one step. Raises ``OSError`` where the folder cannot be written."""
        path = self.path(manifest.model, manifest.fingerprint)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        try:
            temporary.write_text(json.dumps(to_json(manifest), separators=(",", ":")), encoding="utf-8")
            temporary.replace(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        self._prune()
        return path

    def _prune(self) -> None:
        ages = []
        for path in self.paths():
            with contextlib.suppress(FileNotFoundError):  # another server may be pruning too
                ages.append((path.stat().st_mtime, path))
        for _, path in sorted(ages)[:-MOST_MANIFESTS]:
            path.unlink(missing_ok=True)

    def add_late(self, manifest: Manifest, note: LateNote) -> Manifest:
        """Append what production met to the newest state of the file, each point once."""
        newest = self.find(manifest.model, manifest.fingerprint).manifest or manifest
        if any(known.point == note.point for known in newest.late):
            return newest
        newest = evolve(newest, late=(*newest.late, note)[-MOST_LATE:])
        self.write(newest)
        return newest

    def add_certificate(self, manifest: Manifest, certificate: Mapping[str, Any]) -> Path:
        newest = self.find(manifest.model, manifest.fingerprint).manifest or manifest
        return self.write(evolve(newest, certificate=dict(certificate)))


def default_cache_dir(asked: str | None) -> Path:
    """``--cache-dir``, or ``~/.cache/freetoken``, under ``XDG_CACHE_HOME`` where that is set."""
    if asked is not None:
        return Path(asked).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "freetoken"


def now() -> str:
    """The time as manifests say it, to the second, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "model": manifest.model,
        "written": manifest.written,
        "fingerprint": dict(manifest.fingerprint.facts),
        "proven": manifest.proven,
        "compiled": dict(manifest.compiled),
        "late": [{"point": point_to_json(n.point), "events": list(n.events)} for n in manifest.late],
        "seconds": dict(manifest.seconds),
        "kernel_seconds": dict(manifest.kernel_seconds),
        "certificate": manifest.certificate,
        "survey": None if manifest.survey is None else survey_to_json(manifest.survey),
    }


def read_manifest(path: Path) -> Found:
    """Any file; what is not a manifest comes back as a reason."""
    try:
        return Found(_from_json(json.loads(path.read_text(encoding="utf-8"))), "")
    except OSError as error:
        return Found(None, f"{path.name} cannot be read: {error.strerror or error}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Found(None, f"{path.name} is damaged ({type(error).__name__}: {error}) and is ignored")


def _from_json(data: Any) -> Manifest:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}, this version writes {FORMAT}")
    return Manifest(
        fingerprint=Fingerprint.of({str(k): str(v) for k, v in data["fingerprint"].items()}),
        model=str(data["model"]),
        written=str(data["written"]),
        survey=None if data["survey"] is None else survey_from_json(data["survey"]),
        compiled={str(k): str(v) for k, v in data["compiled"].items()},
        proven=data["proven"] is True,
        late=tuple(LateNote(point_from_json(n["point"]), tuple(map(str, n["events"]))) for n in data["late"]),
        seconds={str(k): float(v) for k, v in data["seconds"].items()},
        kernel_seconds={str(k): float(v) for k, v in data["kernel_seconds"].items()},
        certificate=data["certificate"],
    )
