"""From a command's options to a start: the names are checked, the model is found. Imports no torch."""

from __future__ import annotations

from freetoken.config.engine_options import CoreOptions
from freetoken.config.sources import Settings
from freetoken.plugin.commands import CommandContext
from freetoken.plugin.options import CORE_OWNER
from freetoken.serve.start import EngineStart, check_names
from freetoken.weights.locate import locate


def engine_start(context: CommandContext) -> EngineStart:
    """Raises ``MissingPlugin`` or ``UsageError`` for names nobody offers and for a model that is not there."""
    settings: Settings = context.settings
    positional = getattr(context.args, "model_argument", None)
    if positional is not None:
        settings = settings.with_value(CORE_OWNER, "model", positional, "argument MODEL")
    options = settings.core(CoreOptions)
    check_names(options, context.plugins.catalogs)
    found = locate(options.model)
    return EngineStart(context.plugins.selection, settings, found.path, found.short_name)
