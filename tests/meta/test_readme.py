"""The README is true. Oracle: its own commands and snippets, run in a fresh environment beside freshly built wheels.

Every shell command in it is either run here or stands in ``NOT_RUN_HERE`` with the reason.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from freetoken.builtin import BUILTINS
from freetoken.plugin.distributions import known_distributions
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.selection import Selection

ROOT = Path(__file__).resolve().parents[2]
SHOWN = "http://127.0.0.1:1919"
NOT_RUN_HERE = {
    "make serve": "sets up a whole environment anew: the run on a fresh clone does it, and tests/e2e serves",
    "make wheels": "the fixture builds the same wheels, with the tools that are here already",
    "export PIP_FIND_LINKS=$PWD/dist": "the environment has it set to the fixture's folder",
}
SERVE = "freetoken serve --moe-strategy offload --warmup-policy none"
SMALL = {"FREETOKEN_MAX_SEQ_LEN": "64", "OMP_NUM_THREADS": "1", "FREETOKEN_DEVICE": "cpu"}


@pytest.fixture
def readme(document: Callable[[str], Any]) -> Any:
    return document("README.md")


def test_every_command_is_run_or_excused(readme: Any) -> None:
    """And the excuses are about commands that are really there."""
    commands = set(readme.commands())
    run = {c for c in commands if c.split()[0] in ("pip", "curl", "freetoken")}
    assert commands - run == set(NOT_RUN_HERE)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def serving(environment: Any, command: str, cwd: Path) -> Iterator[str]:
    """The server's address, once it is ready."""
    url, log = f"http://127.0.0.1:{(port := free_port())}", cwd / "server.log"
    variables = environment.variables(FREETOKEN_PORT=str(port), **SMALL)
    with log.open("wb") as out:
        process = subprocess.Popen(shlex.split(command), cwd=cwd, env=variables, stdout=out, stderr=subprocess.STDOUT)
    try:
        limit = time.monotonic() + 300
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < limit, log.read_text()
            try:
                with urllib.request.urlopen(f"{url}/ready", timeout=5):
                    break
            except (urllib.error.HTTPError, OSError):
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def curl(command: str, url: str) -> dict[str, Any]:
    """What the ``curl`` line sends, sent without curl, which not every machine has."""
    words = shlex.split(command)
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    (body,) = (words[i + 1] for i, word in enumerate(words) if word == "-d")
    request = urllib.request.Request(words[1].replace(SHOWN, url), data=body.encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_readers_way_from_installation_to_answers(readme: Any, environment: Any, tmp_path: Path) -> None:
    """In the order of the page: install, be told what is missing, install that, serve, ask in all three ways."""
    commands = readme.commands()
    (refused,) = readme.blocks("text")
    for command in commands:
        if command.startswith("pip "):
            done = environment.run(command, tmp_path)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    told = environment.run(SERVE, tmp_path, **SMALL)
    assert (told.returncode, told.stderr) == (2, refused.body)
    fix = refused.body.rpartition("fix:")[2].strip()
    assert environment.run(fix, tmp_path).returncode == 0
    for command in commands:
        if command.startswith("freetoken ") and command != SERVE:
            done = environment.run(command, tmp_path, **SMALL)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            assert done.stdout.strip()
    assert "unused: no experts" in done.stdout, "the last of them is explain"
    remote, local = (b.body for b in readme.blocks("python"))
    (asked,) = (c for c in commands if c.startswith("curl "))
    with serving(environment, SERVE, tmp_path) as url:
        assert curl(asked, url)["choices"][0]["message"]["content"]
        (tmp_path / "remote.py").write_text(remote.replace(SHOWN, url))
        done = environment.run("python remote.py", tmp_path)
        assert "Paris" in done.stdout, done.stderr
    (tmp_path / "local.py").write_text(local)
    done = environment.run("python local.py", tmp_path, OMP_NUM_THREADS="1")
    assert "Paris" in done.stdout, done.stderr


def test_the_table_of_packages_lists_those_there_are(readme: Any) -> None:
    """Oracle: the folders, and the list behind the ``pip install`` hints."""
    listed = set(re.findall(r"^\| `(freetoken-[\w-]+)` \|", readme.text, re.M))
    folders = {f"freetoken-{p.parent.name.replace('_', '-')}" for p in ROOT.glob("plugins/*/pyproject.toml")}
    assert listed == {"freetoken-core", *folders}
    assert folders <= set(known_distributions())


def test_the_commands_it_names_exist_and_all_families_are_named(readme: Any, document: Callable[[str], Any]) -> None:
    families = build_plugins(Selection(), BUILTINS).catalogs.model_families
    page = document("docs/models.md").text
    for spec in families:
        assert f"| `{spec.name}` |" in page
        for name in (*spec.architectures, *spec.gguf_architectures):
            assert f"`{name}`" in page, name
    for name in families.names():
        assert name.partition("-")[0].lower() in readme.text.lower()


def test_every_link_leads_somewhere(documents: Sequence[Any]) -> None:
    """Relative links of every page, headings left out."""
    broken = [
        f"{page.path.relative_to(ROOT)}: {target}"
        for page in documents
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.text)
        if not (page.path.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)
