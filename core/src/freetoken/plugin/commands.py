"""Commands of the ``freetoken`` program, the built-in ones and those that plugins add, in one form."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

from attrs import define, field, frozen

from freetoken.vocab.errors import PluginError


class CommandContext(Protocol):
    """What a command runs with: its own parsed arguments, the loaded plugins, and the merged options."""

    @property
    def args(self) -> argparse.Namespace: ...

    @property
    def plugins(self) -> Any: ...  # freetoken.plugin.manager.Plugins

    @property
    def settings(self) -> Any: ...  # freetoken.config.sources.Settings


@frozen
class Command:
    """``configure`` adds arguments of its own; ``run`` returns the exit code.

    ``engine_options`` says that the command also takes every option of every owner (``serve``, ``generate``, …).
    """

    name: str
    summary: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[CommandContext], int]
    engine_options: bool = False


@define
class CommandGroup:
    """What ``freetoken_add_commands`` receives."""

    owner: str = "core"
    owners: dict[str, str] = field(factory=dict)
    commands: dict[str, Command] = field(factory=dict)

    def add(self, command: Command) -> None:
        """Register a command; a name that is taken is an error naming both owners."""
        taken = self.owners.get(command.name)
        if taken is not None:
            raise PluginError(
                f"the command {command.name!r}",
                f"{taken} and {self.owner} both bring it",
                f"block one of them, for example with --plugin no:{self.owner}",
            )
        self.commands[command.name] = command
        self.owners[command.name] = self.owner
