"""Every error FreeToken raises on purpose.

    FreeTokenError
    ├── UsageError          what was asked cannot be done; exit code 2, HTTP 400
    │   ├── OptionError     a flag, variable or file key
    │   ├── MissingPlugin   a name that an uninstalled package would bring
    │   └── RefusedPlan     nothing the machine has fits the request
    ├── CheckpointError     a model's files are missing, damaged or not implemented
    ├── PluginError         a plugin broke its contract
    └── EngineError         the engine failed while running

Each says what was asked, what is true, and what to do.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Refusal:
    """A request that cannot be met: what was asked, what is true, what to do about it."""

    asked: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        lines = [self.asked, f"  found: {self.found}"]
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class FreeTokenError(Exception):
    """Base of all; carries the refusal so that every surface can print the same three parts."""

    def __init__(self, asked: str, found: str = "", fix: str = "") -> None:
        self.refusal = Refusal(asked, found, fix)
        super().__init__(asked, found, fix)

    def __str__(self) -> str:
        return str(self.refusal) if self.refusal.found else self.refusal.asked


class UsageError(FreeTokenError):
    """The user asked for something that cannot be done as asked."""


class OptionError(UsageError):
    """A flag, an environment variable or a key of ``freetoken.toml`` is unknown or has a wrong value."""


class MissingPlugin(UsageError):
    """A name nobody installed offers; the fix is the ``pip install`` line."""


class RefusedPlan(UsageError):
    """The plan does not fit this machine; the text carries the numbers."""


class CheckpointError(FreeTokenError):
    """A checkpoint is missing, truncated, corrupt, unsafe, or holds a value that is not implemented."""


class PluginError(FreeTokenError):
    """A plugin broke the contract of the hook it implements; the text names the plugin."""


class EngineError(FreeTokenError):
    """The engine failed while running."""
