"""What the tests of the documents share: fenced blocks, and a fresh environment that pip may install into."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(?P<language>\w+)(?: file=(?P<file>\S+))?\n(?P<body>.*?)^```$", re.M | re.S)


@frozen
class Block:
    """A fenced block of a document; ``file`` is the name after ``file=`` behind the language."""

    language: str
    body: str
    file: str = ""


@frozen
class Document:
    """A page of this repository."""

    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def blocks(self, language: str) -> tuple[Block, ...]:
        found = (Block(m["language"], m["body"], m["file"] or "") for m in FENCE.finditer(self.text))
        return tuple(b for b in found if b.language == language)

    def commands(self) -> tuple[str, ...]:
        """Every command of the ``sh`` blocks, in order; continued lines are one."""
        joined = "".join(b.body for b in self.blocks("sh")).replace("\\\n", " ")
        return tuple(line.strip() for line in joined.splitlines() if line.strip())

    def files(self) -> dict[str, str]:
        """Name → text, of the blocks that are files."""
        return {m["file"]: m["body"] for m in FENCE.finditer(self.text) if m["file"]}


@frozen
class Environment:
    """A virtual environment in which nothing of ours is installed yet; pip finds our wheels and no network."""

    venv: Path
    wheels: Path

    def variables(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FREETOKEN_", "PYTHON", "PIP_"))}
        path = f"{self.venv / 'bin'}{os.pathsep}{kept.get('PATH', '')}"
        # Build tools are lent too; pip reads the variable of that flag the other way round: 0 is "no isolation".
        pip = {"PIP_FIND_LINKS": str(self.wheels), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        return {**kept, **pip, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1", **more}

    def run(self, command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command line as a reader would type it, with ``pip``, ``python`` and ``freetoken`` of this environment."""
        return subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=cwd, timeout=600,
            env=self.variables(**variables),
        )  # fmt: skip


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``dist`` folder with every package of this repository, built as `make wheels` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    packages = [ROOT / "core", *(p.parent for p in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    _call(sys.executable, "-m", "pip", "wheel", *flags, *map(str, packages))
    return folder


@pytest.fixture
def environment(tmp_path: Path, wheels: Path) -> Environment:
    """Third-party packages are lent by links, so that gigabytes need not be copied."""
    venv = tmp_path / "venv"
    _call(sys.executable, "-m", "venv", "--without-pip", str(venv))
    site = next((venv / "lib").glob("python*")) / "site-packages"
    _lend(site)
    script = venv / "bin" / "pip"
    script.write_text(f"#!{venv}/bin/python\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return Environment(venv, wheels)


def _lend(site: Path) -> None:
    import torch

    for entry in Path(torch.__file__).parents[1].iterdir():
        ours = entry.name.lower().startswith(("freetoken", "_freetoken", "__editable__"))
        if not ours and entry.suffix != ".pth" and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)


@pytest.fixture(scope="session")
def document() -> Callable[[str], Document]:
    """``document("README.md")``."""
    return lambda name: Document(ROOT / name)


@pytest.fixture(scope="session")
def documents() -> Sequence[Document]:
    """Every page of this repository."""
    patterns = ("*.md", "docs/**/*.md", "core/*.md", "plugins/*/*.md")
    return [Document(path) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
