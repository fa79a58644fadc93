"""What must be quick imports nothing heavy. Oracle: ``sys.modules`` of a fresh interpreter that ran the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "triton", "transformers", "tokenizers", "fastapi", "uvicorn", "numpy", "safetensors", "jinja2")
PLUGIN = "import freetoken\n@freetoken.hookimpl\ndef freetoken_kernels():\n    return ()\n"
PROGRAM = """
import json, sys
from freetoken.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code or 0
print("\\n@" + json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def modules_after(*arguments: str, cwd: Path) -> tuple[int, set[str]]:
    """The exit code, and the top-level packages that are imported by then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    code, names = json.loads(done.stdout.rpartition("\n@")[2])
    return code, set(names)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--help",), 0),
        (("--version",), 0),
        (("serve", "--help"), 0),
        (("plugins",), 0),
        (("plugins", "--json"), 0),
        (("models",), 0),
        (("serve", "--no-such-flag"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else f"exit-{value}",
)
def test_no_heavy_import(arguments: tuple[str, ...], expected: int, tmp_path: Path) -> None:
    code, modules = modules_after(*arguments, cwd=tmp_path)
    assert code == expected
    assert not modules.intersection(HEAVY)


def test_the_http_process_imports_no_torch(tmp_path: Path) -> None:
    """Up to the refusal of a name nobody offers; what serves requests is imported by then."""
    code, modules = modules_after("serve", "--warmup-policy", "nobody-has-it", cwd=tmp_path)
    assert code == 2
    assert "fastapi" in modules
    assert not modules.intersection({"torch", "triton", "transformers"})


def test_the_check_can_fail(tmp_path: Path) -> None:
    """A plugin that imports numpy is seen."""
    (tmp_path / "heavy_plugin.py").write_text("import numpy\n" + PLUGIN)
    _, modules = modules_after("plugins", "--plugin", "heavy_plugin", cwd=tmp_path)
    assert "numpy" in modules
