"""Plans made from a configuration alone, for any card, with no checkpoint, no probe of this machine and no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freetoken.builtin import BUILTINS
from freetoken.config.engine_options import CoreOptions
from freetoken.config.facts import CheckpointFacts
from freetoken.config.resolve import Inputs, Resolved, resolve
from freetoken.plugin.manager import Plugins, build_plugins
from freetoken.plugin.report import availability
from freetoken.plugin.selection import Selection
from freetoken.run.warmup_space import plan_launch_space
from freetoken.vocab.errors import Refusal, RefusedPlan
from freetoken.vocab.hardware import Device, Hardware
from freetoken.vocab.units import GIB
from freetoken.vocab.weight import CheckpointIndex
from freetoken.warmup.launch_space import DeclaredLaunchSpace


def planned(
    config: Mapping[str, Any],
    device: Device | None = None,
    *,
    dtype: str = "bfloat16",
    plugins: Plugins | None = None,
    options: CoreOptions | None = None,
    plugin_options: Mapping[type, object] | None = None,
) -> Resolved:
    """The plan of a model with ``config`` and plain weights, on ``device`` (by default a CPU), with all that is
    installed. Raises ``RefusedPlan``."""
    loaded = plugins if plugins is not None else build_plugins(Selection(), BUILTINS)
    hardware = Hardware(16, 256 * GIB, 256 * GIB, () if device is None else (device,))
    given = dict(plugin_options or {})

    def options_of(cls: type | None) -> object:
        return None if cls is None else given.get(cls, cls())

    facts = CheckpointFacts("tiny", "tiny", config, tuple(config["architectures"]), CheckpointIndex("dummy", {}), dtype)
    inputs = Inputs(
        options if options is not None else CoreOptions(), facts, hardware, loaded.catalogs, loaded.choose,
        lambda spec: availability(spec, hardware, False), options_of,
    )  # fmt: skip
    found = resolve(inputs)
    if isinstance(found, Refusal):
        raise RefusedPlan(found.asked, found.found, found.fix)
    return found


def launch_space_of(resolved: Resolved, plugins: Plugins | None = None) -> DeclaredLaunchSpace:
    """The launch space of a resolved plan."""
    loaded = plugins if plugins is not None else build_plugins(Selection(), BUILTINS)
    return plan_launch_space(resolved, loaded.catalogs)
