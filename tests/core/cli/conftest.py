"""The program in this process, in an empty folder, with no variables of ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import frozen

from freetoken.cli.main import main
from freetoken.models import llama
from freetoken.testing.checkpoints import write_tiny


@frozen
class Ended:
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """``run("plugins", "--json")``; argparse's own exits are turned into codes."""
    for name in list(os.environ):
        if name.startswith("FREETOKEN_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def call(*arguments: object) -> Ended:
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return call


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny Llama with random weights, a byte tokenizer and a chat template."""
    return write_tiny(llama.FAMILY, tmp_path / "tiny")
