"""Builds the command line from commands and option classes; the flags of an option exist because its field does."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import frozen

from freetoken.config.sources import FlagValue, OptionTable, refuse_flag
from freetoken.plugin.commands import Command
from freetoken.plugin.options import CORE_OWNER, OptionField
from freetoken.vocab.errors import UsageError
from freetoken.vocab.units import format_bytes

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
            one.usage = _short_usage(one)  # taken now: some forty options would follow
            _add_options(one, table)
        _add_selection(one)
        one.set_defaults(run_command=command, flag_values=[])
    return parser


def _short_usage(parser: argparse.ArgumentParser) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", parser.format_usage())  # newer Pythons colour it
    return f"{plain.removeprefix('usage: ').strip()} [options]".replace("%", "%%")


def _add_options(parser: argparse.ArgumentParser, table: OptionTable) -> None:
    groups: dict[str, Any] = {}
    for option in table.fields:
        group = groups.get(option.owner)
        if group is None:
            title = "engine and server" if option.owner == CORE_OWNER else f"plugin {option.owner}"
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
            group.add_argument(
                flag, action=_Given, option=option, dest="flag_values", metavar=_metavar(option), help=shown
            )


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
    """What stands for the value: as told, the choices, the unit, a number's letter, or the option's last word."""
    if option.meta.metavar:
        return option.meta.metavar
    if option.meta.choices:
        return "{" + ",".join(option.meta.choices) + "}"
    if option.meta.unit:
        return {"bytes": "SIZE"}.get(option.meta.unit, option.meta.unit.upper())
    letters: dict[object, str] = {int: "N", float: "X"}
    return letters.get(option.base_type, option.name.rpartition("_")[2].upper())


def _help(option: OptionField) -> str:
    text = option.meta.help
    if option.base_type is bool:
        text += f"; on by default, --no-{option.flag[2:]} turns it off" if option.default else ""
    elif option.default not in (None, (), "auto") and "default" not in text:
        shown = format_bytes(int(str(option.default))) if option.meta.unit == "bytes" else option.default
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str], table: OptionTable) -> argparse.Namespace:
    """Like ``parse_args``, but unknown flags are refused with the known ones, or with the package that brings them."""
    args, unknown = parser.parse_known_args(list(argv))
    for word in unknown:
        if word.startswith("--"):
            refuse_flag(word.partition("=")[0], table)
        raise UsageError(f"{word}", "the command takes no such argument", f"see {PROG} {args.command or ''} --help")
    return args
