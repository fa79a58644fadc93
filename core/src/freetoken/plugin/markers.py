"""The pluggy markers of the project ``freetoken``."""

from __future__ import annotations

import pluggy

PROJECT = "freetoken"
ENTRY_POINT_GROUP = "freetoken"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
