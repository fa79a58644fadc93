"""A stranger ships a warmup policy as a wheel of one file. Oracle: a fresh environment with only the built wheels."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]

POLICY = """
from freetoken import hookimpl
from freetoken.plugin.specs import WarmupPolicySpec
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.warmup import Forward


class Theirs:
    def steps(self, plan, launch_space, known):
        for tokens in (3, 17):
            point = StepPoint(tokens=tokens, sequences=1, max_query=tokens, max_context=tokens, rows=1, decode=False)
            yield Forward(point, because="a stranger asked for it")


@hookimpl
def freetoken_warmup_policies():
    return [WarmupPolicySpec(name="theirs", summary="two prefills", create=lambda options: Theirs())]
"""


def make_wheel(folder: Path, name: str, body: str) -> Path:
    """The smallest wheel there is: one module and one entry point."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    files = {
        f"{module}.py": body,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: freetoken-core\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[freetoken]\n{name} = {module}\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return wheel


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment: the core's wheel beside nothing of ours. Heavy libraries are lent by a path file."""
    base = tmp_path_factory.mktemp("stranger")
    core = base / "wheels"
    _run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(core),
            str(ROOT / "core"),
        ]
    )
    venv = base / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    site = next((venv / "lib").glob("python*")) / "site-packages"
    _lend_libraries(site)
    _install(site, next(core.glob("freetoken_core-*.whl")))
    return venv


def _lend_libraries(site: Path) -> None:
    """Link every installed package except ours, so that gigabytes need not be copied and no plugin of ours leaks in."""
    import torch

    source = Path(torch.__file__).parents[1]
    for entry in source.iterdir():
        ours = entry.name.lower().startswith(("freetoken", "_freetoken", "__editable__"))
        if not ours and not entry.name.endswith(".pth"):
            (site / entry.name).symlink_to(entry)


def _install(site: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def _run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env, **kwargs)


def _freetoken(venv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [str(venv / "bin" / "python"), "-m", "freetoken", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_with_only_the_core_the_answer_is_the_pip_line_and_exit_code_2(environment: Path) -> None:
    done = _freetoken(environment, "serve", "--moe-strategy", "offload", "--warmup-policy", "none")
    assert done.returncode == 2
    assert "pip install freetoken-moe-offload" in done.stderr
    assert "Traceback" not in done.stderr


BROKEN = {
    "bad-import": "import nothing_of_that_name\n",
    "bad-hook": "from freetoken import hookimpl\n@hookimpl\ndef freetoken_warmup_policys():\n    return []\n",
    "bad-signature": "from freetoken import hookimpl\n@hookimpl\ndef freetoken_ready(plan, moon):\n    pass\n",
    "duplicate-name": POLICY.replace('name="theirs"', 'name="none"'),
}


def test_their_policy_runs_and_broken_neighbours_are_reported(environment: Path, tmp_path: Path, serve: Any) -> None:
    site = next((environment / "lib").glob("python*")) / "site-packages"
    for name, body in {"acme-warmup": POLICY, **BROKEN}.items():
        _install(site, make_wheel(tmp_path, name, body))
    listed = _freetoken(environment, "plugins").stdout
    for name in BROKEN:
        assert f"{name}  ({name} 1.0)  failed: " in listed
    assert "acme-warmup  (acme-warmup 1.0)  active" in listed
    server = serve(
        "--warmup-policy", "theirs", "--max-seq-len", "256", python=str(environment / "bin" / "python"), PYTHONPATH=""
    )
    log = server.text()
    assert "warmup policy theirs" in log
    assert "2 steps" in log
    assert "a stranger asked for it" in log


def test_a_broken_plugin_that_was_asked_for_ends_the_start(environment: Path, tmp_path: Path) -> None:
    site = next((environment / "lib").glob("python*")) / "site-packages"
    _install(site, make_wheel(tmp_path, "really-bad", "import nothing_of_that_name\n"))
    done = _freetoken(environment, "serve", "--plugin", "really-bad")
    assert done.returncode == 2
    assert "nothing_of_that_name" in done.stderr
