"""Commands of the ``freetoken`` program, the built-in ones and those that plugins add, in one form."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from attrs import define, field, frozen

from freetoken.vocab.errors import PluginError


@frozen
class Command:
    """``configure`` adds arguments; ``run`` gets the parsed arguments and returns the exit code.

    ``engine_options`` says that the command also takes every engine flag (``serve``, ``generate``, ``explain``).
    """

    name: str
    summary: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    engine_options: bool = False
    owner: str = "core"


@define
class CommandGroup:
    """What ``freetoken_add_commands`` receives."""

    owner: str = "core"
    commands: dict[str, Command] = field(factory=dict)

    def add(self, command: Command) -> None:
        """Register a command; a name that is taken is an error naming both owners."""
        taken = self.commands.get(command.name)
        if taken is not None:
            raise PluginError(
                f"two plugins add the command {command.name!r}",
                f"{taken.owner} and {command.owner} both bring it",
                f"block one of them with --plugin no:{command.owner}",
            )
        self.commands[command.name] = command
