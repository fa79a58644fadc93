"""The help says what can be typed. Oracles: the commands, the option classes, and the parser's own reading."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

import freetoken
from freetoken.builtin import BUILTINS
from freetoken.cli.parser import build_parser, first_pass, parse
from freetoken.config.sources import OptionTable
from freetoken.plugin.commands import Command, CommandGroup
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.options import OptionField, OptionMeta
from freetoken.plugin.selection import Selection
from freetoken.vocab.errors import OptionError, UsageError

PLUGINS = build_plugins(Selection(), BUILTINS)
TABLE = OptionTable.of(PLUGINS.catalogs.options)


def command_group() -> CommandGroup:
    group = CommandGroup()
    PLUGINS.add_commands(group)
    return group


def parser(*extra: Command) -> argparse.ArgumentParser:
    return build_parser([*command_group().commands.values(), *extra], TABLE, freetoken.__version__)


def test_the_help_lists_every_command_with_its_summary(run: Any) -> None:
    done = run("--help")
    assert done.code == 0
    for command in command_group().commands.values():
        assert re.search(rf"^ +{command.name} +\S", done.out, re.M)
    assert run().out == done.out


def test_the_version_is_the_packages(run: Any) -> None:
    assert run("--version").out == f"freetoken {freetoken.__version__}\n"


@pytest.mark.parametrize("name", ["serve", "generate", "explain"])
def test_an_engines_help_lists_every_flag_of_every_owner(name: str, run: Any) -> None:
    text = run(name, "--help").out
    for field in TABLE.fields:
        for flag in field.flags:
            assert re.search(rf"^  {re.escape(flag)}\b", text, re.M), flag
    assert text.splitlines()[0].startswith(f"usage: freetoken {name} [-h]")
    usage = text.partition("\n\n")[0]
    assert "[options]" in usage
    assert "--port" not in usage, "forty options would hide the command's own arguments"
    for owner in {f.owner for f in TABLE.fields} - {"core"}:
        assert f"plugin {owner}:" in text


def test_the_help_shows_defaults_and_how_a_switch_is_turned_off(run: Any) -> None:
    text = " ".join(run("serve", "--help").out.split())
    shown = ("(default: 1919)", "(default: 16.0 MiB)", "on by default, --no-prefix-cache turns it off")
    metavars = ("--kernel OP=NAME", "--host-memory-bytes SIZE", "--cache-dir DIR", "--dtype {auto,float32")
    for part in (*shown, *metavars):
        assert part in text


def field(**meta: Any) -> OptionField:
    return OptionField("mine", "share", float, 0.5, OptionMeta(**{"help": "50 % of all", **meta}))


def test_a_percent_sign_and_a_strangers_metavar_are_shown_as_written() -> None:
    table = OptionTable((field(metavar="PART"),))
    command = Command("x", "Do x", lambda _: None, lambda _: 0, engine_options=True)
    made = build_parser([command], table, "1")
    with pytest.raises(SystemExit):
        made.parse_args(["x", "--help"])
    assert "--mine-share PART" in _help_of(made, "x")
    assert "50 % of all" in _help_of(made, "x")


def _help_of(made: argparse.ArgumentParser, name: str) -> str:
    (sub,) = (a for a in made._actions if isinstance(a, argparse._SubParsersAction))
    return str(sub.choices[name].format_help())


def test_the_first_pass_takes_the_selection_from_anywhere() -> None:
    found = first_pass(["--plugin", "a", "serve", "--port", "1", "--plugin", "no:b", "--config", "f.toml"])
    assert (found.plugin_words, found.config, found.rest) == (("a", "no:b"), "f.toml", ("serve", "--port", "1"))


def test_flags_are_noted_with_their_canonical_name() -> None:
    args = parse(parser(), ["serve", "--port", "1", "--no-prefix-cache", "--cuda-graphs"], TABLE)
    assert [(v.flag, v.raw) for v in args.flag_values] == [
        ("--port", "1"), ("--prefix-cache", False), ("--cuda-graphs", True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "error", "part"),
    [
        (["serve", "--prot", "1"], OptionError, "--port"),
        (["serve", "--por", "1"], OptionError, "--port"),  # abbreviations are off
        (["serve", "--no-prefix-cach"], OptionError, "unknown flag"),
        (["serve", "model"], UsageError, "takes no such argument"),
        (["plugins", "--port", "1"], OptionError, "unknown flag"),
    ],
)
def test_what_is_not_known_is_refused(words: list[str], error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        parse(parser(), words, TABLE)


def test_a_wrong_command_or_a_missing_argument_is_exit_code_2(run: Any) -> None:
    assert run("srve").code == 2
    assert run("generate", "model").code == 2
