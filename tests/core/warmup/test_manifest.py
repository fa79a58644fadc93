"""The store of manifests. Oracle: a round trip, and files looked at by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attrs import evolve

from freetoken.testing.warmup import example_space
from freetoken.vocab.launch import StepPoint
from freetoken.warmup.fingerprint import Fingerprint
from freetoken.warmup.manifest import (
    MOST_LATE,
    MOST_MANIFESTS,
    LateNote,
    Manifest,
    ManifestStore,
    default_cache_dir,
    read_manifest,
)
from freetoken.warmup.survey import survey
from freetoken.warmup.survey_worker import portable

FINGERPRINT = Fingerprint.of({"device": "cpu", "triton": "3.6.0"})


def whole() -> Manifest:
    return Manifest(
        FINGERPRINT,
        model="org/model",
        written="2026-01-01T00:00:00Z",
        survey=portable(survey(example_space(max_tokens=5, max_sequences=2))),
        compiled={"a": "00", "b": ""},
        proven=True,
        late=(LateNote(StepPoint(3, 1, 3, 9, 1, decode=False), ("load of x",)),),
        seconds={"compile": 1.5},
        kernel_seconds={"m:k": 1.0},
        certificate={"passes": True},
    )


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path)
    path = store.write(whole())
    assert path.name.startswith("org-model-")
    assert store.find("org/model", FINGERPRINT).manifest == whole()
    assert read_manifest(path).manifest == whole()


def test_what_is_not_on_disk_is_not_known() -> None:
    known = whole().known(on_disk=frozenset())
    assert known.compiled == {"b"}, "a key without a hash is not Triton's"
    assert not known.proven
    assert whole().known(on_disk=frozenset({"00"})).proven


def test_late_points_are_kept_once_and_not_for_ever(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path)
    manifest = evolve(whole(), late=())
    store.write(manifest)
    for n in range(2, MOST_LATE + 12):
        point = StepPoint(n, 1, n, n, 1, decode=False)
        store.add_late(manifest, LateNote(point, ("x",)))
        store.add_late(manifest, LateNote(point, ("y",)))
    found = store.find("org/model", FINGERPRINT).manifest
    assert found is not None
    assert len(found.late) == MOST_LATE
    assert found.late[-1].point.tokens == MOST_LATE + 11


def test_the_reason_names_what_changed_since_the_newest(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path)
    assert store.find("org/model", FINGERPRINT).because == "no manifest yet"
    store.write(whole())
    other = Fingerprint.of({"device": "cpu", "triton": "3.7.1"})
    assert "triton: 3.7.1, was 3.6.0" in store.find("org/model", other).because
    assert store.find("another", other).because == "no manifest yet"


def test_a_folder_does_not_grow_for_ever(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path)
    for n in range(MOST_MANIFESTS + 3):
        path = store.write(evolve(whole(), survey=None, fingerprint=Fingerprint.of({"n": str(n)})))
        os.utime(path, (n, n))
    store.write(evolve(whole(), survey=None))
    assert len(store.paths()) == MOST_MANIFESTS
    assert store.find("org/model", FINGERPRINT).manifest is not None


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir(None) == tmp_path / ".cache" / "freetoken"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_cache_dir(None) == tmp_path / "x" / "freetoken"
    assert default_cache_dir("~/here") == tmp_path / "here"
