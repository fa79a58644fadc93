"""The core's options, offered like anybody's."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.config.engine_options import CORE_OPTIONS
from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import OptionsSpec


@hookimpl
def freetoken_options() -> Sequence[OptionsSpec]:
    return (CORE_OPTIONS,)
