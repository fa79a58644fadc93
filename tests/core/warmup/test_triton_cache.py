"""Triton's cache folder. Oracle: Triton's own cache manager, which must find what was moved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.cache import FileCacheManager

from freetoken.run.warmup_compile import compile_into
from freetoken.testing.warmup import example_space
from freetoken.vocab.warmup import CompileKeys
from freetoken.warmup.survey import survey_of
from freetoken.warmup.triton_cache import (
    cache_folder,
    folder_name,
    mark_relocatable,
    on_disk,
    relocate,
    relocate_if_moved,
)

DIGEST = "ab" * 32


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one kernel, put there by Triton."""
    folder = tmp_path / "first"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    manager = FileCacheManager(folder_name(DIGEST))
    parts = {name: manager.put(b"content", name) for name in ("k.cubin", "k.json")}
    manager.put_group("k.json", parts)
    return folder


def found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return set(FileCacheManager(folder_name(DIGEST)).get_group("k.json") or ())


def test_the_folder_is_the_one_that_triton_uses(filled: Path) -> None:
    assert cache_folder() == filled
    assert (filled / folder_name(DIGEST)).is_dir()
    assert on_disk([DIGEST, "cd" * 32, ""]) == {DIGEST}


def test_a_moved_folder_is_a_miss_until_it_is_relocated(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = filled.with_name("second")
    assert found(filled, monkeypatch) == {"k.cubin", "k.json"}
    shutil.move(filled, moved)
    assert found(moved, monkeypatch) == set(), "what Triton itself makes of it"
    assert relocate(moved) == 1
    assert found(moved, monkeypatch) == {"k.cubin", "k.json"}
    assert relocate(moved) == 0


def test_a_start_finds_out_by_itself(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert relocate_if_moved(filled) == 0, "not marked: somebody else's cache is left alone"
    mark_relocatable(filled)
    assert relocate_if_moved(filled) == 0, "not moved"
    moved = filled.with_name("second")
    shutil.copytree(filled, moved)
    assert relocate_if_moved(moved) == 1
    assert relocate_if_moved(moved) == 0
    assert found(moved, monkeypatch) == {"k.cubin", "k.json"}
    assert found(filled, monkeypatch) == {"k.cubin", "k.json"}, "the original is as it was"


def test_group_files_of_another_form_are_left_alone(filled: Path) -> None:
    (group,) = filled.glob("*/__grp__*.json")
    group.write_text(json.dumps({"other": 1}))
    assert relocate(filled) == 0
    assert json.loads(group.read_text()) == {"other": 1}


def test_native_modules_are_left_to_a_machine_with_the_card(tmp_path: Path) -> None:
    space = example_space(max_tokens=5, max_sequences=2)
    done = compile_into(tmp_path / "out", space, [CompileKeys(tuple(sorted(survey_of(space).keys)))])
    assert done.report.compiled == 0
    assert done.native
    assert "left to a machine with the card: native modules attention-long" in str(done)
