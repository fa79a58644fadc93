"""Builds the command line from commands and option classes; the flags of an option exist because its field does."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import frozen

from freetoken.config.sources import FlagValue, OptionTable, refuse_flag
from freetoken.plugin.commands import Command
from freetoken.plugin.options import OptionField
from freetoken.vocab.errors import UsageError

PROG = "freetoken"
DESCRIPTION = "Serve open-weight language models on one machine; everything on the hot path is a plugin."
EPILOG = "Options may also come from the environment and from freetoken.toml; docs/options.md lists every name."


@frozen
class FirstPass:
    """What is needed before plugins load: which ones, and which file; the rest is parsed once they are there."""

    plugin_words: tuple[str, ...]
    config: str | None
    rest: tuple[str, ...]


def first_pass(argv: Sequence[str]) -> FirstPass:
    """Take ``--plugin`` and ``--config`` out of the command line."""
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    _add_selection(parser)
    known, rest = parser.parse_known_args(list(argv))
    return FirstPass(tuple(known.plugin or ()), known.config, tuple(rest))


def _add_selection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plugins")
    group.add_argument(
        "--plugin", action="append", metavar="NAME|no:NAME", help="require a plugin, or block it; may be repeated"
    )
    group.add_argument("--config", metavar="FILE", help="configuration file; default: freetoken.toml if it is there")


def build_parser(commands: Iterable[Command], table: OptionTable, version: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROG} {version}")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in commands:
        one = sub.add_parser(
            command.name, help=command.summary, description=f"{command.summary}.", epilog=EPILOG, allow_abbrev=False
        )
        command.configure(one)
        if command.engine_options:
            _add_options(one, table)
        _add_selection(one)
        one.set_defaults(run_command=command, flag_values=[])
    return parser


def _add_options(parser: argparse.ArgumentParser, table: OptionTable) -> None:
    groups: dict[str, Any] = {}
    for option in table.fields:
        group = groups.get(option.owner)
        if group is None:
            title = "options" if option.owner == "core" else f"options of {option.owner}"
            group = groups[option.owner] = parser.add_argument_group(title)
        _add_option(group, option)


def _add_option(group: Any, option: OptionField) -> None:
    text = _help(option)
    for flag in option.flags:
        shown = text if flag == option.flag else f"same as {option.flag}"
        if option.base_type is bool:
            group.add_argument(flag, action=_Given, nargs=0, option=option, raw=True, dest="flag_values", help=shown)
            negative = "--no-" + flag[2:]
            group.add_argument(
                negative, action=_Given, nargs=0, option=option, raw=False, dest="flag_values", help=argparse.SUPPRESS
            )
        else:
            metavar = "{" + ",".join(option.meta.choices) + "}" if option.meta.choices else _metavar(option)
            group.add_argument(flag, action=_Given, option=option, dest="flag_values", metavar=metavar, help=shown)


class _Given(argparse.Action):
    """Notes that a flag was given, with its raw text; typing and merging come later, with the other sources."""

    def __init__(self, *args: Any, option: OptionField, raw: object = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.option_field = option
        self.raw = raw

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        raw = self.raw if self.nargs == 0 else values
        given = [*getattr(namespace, self.dest), FlagValue(self.option_field.flag, raw)]
        setattr(namespace, self.dest, given)


def _metavar(option: OptionField) -> str:
    if option.meta.unit:
        return option.meta.unit.upper()
    kind = getattr(option.base_type, "__name__", "VALUE")
    return {"int": "N", "float": "X", "str": "NAME", "tuple": "OP=NAME"}.get(kind, "VALUE")


def _help(option: OptionField) -> str:
    text = option.meta.help.replace("%", "%%")
    if option.default not in (None, (), "auto") and "default" not in text:
        text += f" (default: {option.default})"
    return text + (f" [--no-{option.flag[2:]} turns it off]" if option.base_type is bool and option.default else "")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str], table: OptionTable) -> argparse.Namespace:
    """Like ``parse_args``, but unknown flags are refused with the known ones, or with the package that brings them."""
    args, unknown = parser.parse_known_args(list(argv))
    for word in unknown:
        if word.startswith("--"):
            refuse_flag(word.partition("=")[0], table)
        raise UsageError(f"{word}", "the command takes no such argument", f"see {PROG} {args.command or ''} --help")
    return args
