"""The tutorial works. Oracle: its own files and commands, taken out of the page and run in a fresh environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = "docs/write_a_plugin.md"


@pytest.fixture
def folder(document: Callable[[str], Any], tmp_path: Path) -> Path:
    """The reader's folder with the page's files in it."""
    made = tmp_path / "acme"
    made.mkdir()
    for name, text in document(PAGE).files().items():
        (made / name).write_text(text)
    return made


def test_every_command_of_the_page_does_what_it_says(
    document: Callable[[str], Any], environment: Any, folder: Path
) -> None:
    page = document(PAGE)
    assert set(page.files()) == {"acme_freetoken.py", "pyproject.toml", "test_acme.py"}
    shown = [line for block in page.blocks("text") for line in block.body.splitlines()]
    printed: list[str] = []
    for command in page.commands():
        done = environment.run(command, folder, FREETOKEN_MAX_SEQ_LEN="256", OMP_NUM_THREADS="1")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        printed += done.stdout.splitlines()
    assert len(shown) == 7
    for line in shown:
        assert line in printed, f"{line!r} was not printed"
    assert any("passed" in line and "failed" not in line for line in printed[-3:]), printed[-3:]


def test_the_options_other_spellings_and_the_uninstalled_module(
    document: Callable[[str], Any], environment: Any, folder: Path
) -> None:
    """What the page says of variable, file and ``--plugin`` with the folder on the path."""
    assert environment.run("pip install freetoken-core", folder).returncode == 0
    explain = "freetoken explain smollm2 --plugin acme_freetoken --warmup-policy acme"
    (toml,) = (b.body for b in document(PAGE).blocks("toml") if not b.file)
    (folder / "freetoken.toml").write_text(toml)
    by_file = environment.run(explain, folder, PYTHONPATH=str(folder))
    assert "longest = 16  (freetoken.toml: acme.longest)" in by_file.stdout, by_file.stderr
    by_variable = environment.run(explain, folder, PYTHONPATH=str(folder), FREETOKEN_ACME_LONGEST="8")
    assert "longest = 8  (FREETOKEN_ACME_LONGEST)" in by_variable.stdout
