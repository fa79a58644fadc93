"""The list of benchmarks is complete. Oracle: the folder."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_script_is_listed_and_every_listed_one_is_there() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in FOLDER.glob("*.py")}
    words = {word.rpartition("/")[2] for word in text.replace("`", " ").replace(",", " ").split()}
    assert {word for word in words if word.endswith(".py")} == scripts
