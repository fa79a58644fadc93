"""Exit codes and what is printed where. Oracle: the rules in ``cli/main.py``'s docstring."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from freetoken.vocab.errors import CheckpointError, EngineError, PluginError, UsageError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("--x", "not so", "do y"), 2),
        (CheckpointError("read f", "truncated", "again"), 2),
        (EngineError("a step", "it failed", "retry"), 1),
        (PluginError("plugin p", "it lied", "block it"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else str(v),
)
def test_errors_made_for_people_are_three_lines_and_a_code(
    error: BaseException, code: int, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> int:
        raise error

    monkeypatch.setattr("freetoken.cli.commands._models", fail)
    monkeypatch.setattr(sys.stderr, "close", lambda: None)
    done = run("models")
    assert done.code == code
    assert "Traceback" not in done.err
    if isinstance(error, UsageError | CheckpointError | EngineError | PluginError):
        refusal = error.refusal
        assert done.err == f"freetoken: {refusal.asked}\n  found: {refusal.found}\n  fix:   {refusal.fix}\n"


def test_a_bug_is_not_dressed_up_as_a_refusal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("freetoken.cli.commands._models", fail)
    with pytest.raises(ZeroDivisionError):
        run("models")


def test_warnings_go_to_standard_error_and_the_command_runs(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_PROT", "1")
    done = run("models", "--json")
    assert done.code == 0
    assert done.err.startswith("freetoken: warning: FREETOKEN_PROT is set, but nothing reads it")
    assert done.out.startswith("{")


ANSWER = """
from freetoken import hookimpl
from freetoken.plugin.commands import Command

@hookimpl
def freetoken_add_commands(commands):
    commands.add(Command("answer", "Say it", lambda parser: parser.add_argument("word"), run))

def run(context):
    print(context.args.word, context.settings.values["core", "port"].value)
    return 42
"""


def test_a_plugins_command_runs_and_its_code_is_the_programs(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answering.py").write_text(ANSWER)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = run("answer", "well", "--plugin", "answering")
    assert (done.code, done.out) == (42, "well 1919\n")
    assert "answer " in run("--help", "--plugin", "answering").out
