"""Imports point down. Oracle: the order of floors in ARCHITECTURE.md, checked on every import of every file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "core" / "src" / "freetoken"

# Each floor may import itself and the floors in earlier rows; rooms of one row do not know each other.
ROWS: tuple[tuple[str, ...], ...] = (
    ("vocab",),
    ("plugin",),
    ("ops", "kv", "weights", "memory"),
    ("models", "warmup"),
    ("builtin",),
    ("config",),
    ("run",),
    ("schedule",),
    ("serve",),
    ("cli",),
    ("testing",),
)
FLOOR = {name: row for row, names in enumerate(ROWS) for name in names}
PUBLIC = {"freetoken", "freetoken.__init__"}


def _imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in the file, also inside functions and under TYPE_CHECKING."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return [(line, module) for line, module in found if module.split(".")[0] == "freetoken"]


def _files() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE)


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0]
    wrong = []
    for line, module in _imports(path):
        parts = module.split(".")
        target = parts[1] if len(parts) > 1 else ""
        if not target or target == room:
            continue
        if FLOOR[target] >= FLOOR[room]:
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_a_floor() -> None:
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == set(FLOOR)


def test_plugins_import_only_what_is_meant_for_them() -> None:
    """A plugin package leans on the vocabulary, the plugin floor, the ops and shared decisions; never on the engine."""
    allowed = {"vocab", "plugin", "ops", "kv", "weights", "memory", "models", "warmup"}
    wrong = []
    for path in sorted(ROOT.glob("plugins/*/src/**/*.py")):
        for line, module in _imports(path):
            parts = module.split(".")
            if len(parts) > 1 and parts[1] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)
