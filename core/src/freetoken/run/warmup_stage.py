"""The warmup as a stage of a start: which policy, what is known, and where the pieces come from."""

from __future__ import annotations

from collections.abc import Callable

from freetoken.config.resolve import Resolved
from freetoken.plugin.catalog import Catalogs
from freetoken.run.warmup import WarmupRun
from freetoken.run.warmup_device import WarmupDevice
from freetoken.run.warmup_space import plan_launch_space
from freetoken.vocab.warmup import Known

OptionsOf = Callable[[type | None], object]
StartReport = Callable[[str, float, str], None]


def begin_warmup(resolved: Resolved, catalogs: Catalogs, options_of: OptionsOf, report: StartReport) -> WarmupRun:
    """The planned policy's warmup, already compiling in the background."""
    spec = catalogs.warmup_policies.get(resolved.plan.warmup.name)
    space = plan_launch_space(resolved, catalogs)
    run = WarmupRun(
        name=spec.name,
        policy=spec.create(options_of(spec.options)),
        plan=resolved.plan,
        space=space,
        known=Known(),
        device=WarmupDevice(space),
        report=lambda fraction, words: report("warmup", fraction, words),
    )
    run.start_compile()
    return run
