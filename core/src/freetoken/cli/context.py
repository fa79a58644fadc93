"""What a command runs with, and how it is put together: two passes, the plugin selection first."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from attrs import frozen

import freetoken
from freetoken.builtin import BUILTINS
from freetoken.cli.parser import build_parser, first_pass, parse
from freetoken.config.sources import OptionTable, Settings, merge, read_config_file
from freetoken.plugin.commands import CommandGroup
from freetoken.plugin.manager import Plugins, build_plugins
from freetoken.plugin.selection import Selection, selection_words
from freetoken.vocab.errors import OptionError


@frozen
class Context:
    """Implements ``plugin.commands.CommandContext``."""

    args: argparse.Namespace
    plugins: Plugins
    settings: Settings
    table: OptionTable


def build_context(argv: Sequence[str]) -> tuple[Context, argparse.ArgumentParser]:
    """Load plugins as selected, then parse the rest of the command line with what they brought."""
    first = first_pass(argv)
    file, file_name = read_config_file(first.config or os.environ.get("FREETOKEN_CONFIG"))
    table_of_plugins = file.get("plugins", {})
    if not isinstance(table_of_plugins, dict):
        raise OptionError(
            f"plugins = {table_of_plugins!r} in {file_name}", "it must be a section, [plugins]",
            'write [plugins] and below it block = ["NAME"] or require = ["NAME"]',
        )  # fmt: skip
    words = selection_words(first.plugin_words, os.environ.get("FREETOKEN_PLUGINS", ""), table_of_plugins)
    plugins = build_plugins(Selection.of(words), BUILTINS)
    commands = CommandGroup()
    plugins.add_commands(commands)
    table = OptionTable.of(plugins.catalogs.options)
    parser = build_parser(commands.commands.values(), table, freetoken.__version__)
    args = parse(parser, first.rest, table)
    settings = merge(
        table,
        flags=getattr(args, "flag_values", []),
        environment=os.environ,
        file=file,
        file_name=file_name,
        records=plugins.records,
    )
    return Context(args, plugins, settings, table), parser
