"""A plugin as it lies in a folder of installed packages: one module and its entry point."""

from __future__ import annotations

from pathlib import Path

from freetoken.plugin.markers import ENTRY_POINT_GROUP


def write_plugin(folder: Path, name: str, source: str) -> Path:
    """The plugin ``name`` with the module text ``source``; found by every process with ``folder`` in PYTHONPATH."""
    module = name.replace("-", "_")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = {module}\n", encoding="utf-8")
    return folder
