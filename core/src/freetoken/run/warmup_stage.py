"""The warmup as a stage of a start: which policy, what is known, and where the pieces come from."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from freetoken.config.resolve import Resolved
from freetoken.plugin.catalog import Catalogs
from freetoken.run.loader import OptionsOf
from freetoken.run.warmup import Scratch, WarmupOutcome, WarmupRun
from freetoken.run.warmup_device import WarmupDevice
from freetoken.run.warmup_memory import WarmupMemory
from freetoken.run.warmup_space import plan_launch_space
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Known
from freetoken.warmup.launch_space import DeclaredLaunchSpace

StartReport = Callable[[str, float, str], None]


@frozen(eq=False)
class WarmupStage:
    """A warmup under way. Call ``load`` once the weights are in, ``finish`` once the caches are there."""

    plan: Plan
    space: DeclaredLaunchSpace
    device: WarmupDevice
    run: WarmupRun
    memory: WarmupMemory | None

    def load(self) -> None:
        self.run.load()

    def finish(self, scratch: Scratch, capture: Callable[[], None]) -> WarmupOutcome:
        """Runs the rest, and leaves a manifest for the next start."""
        outcome = self.run.finish(scratch, capture)
        if self.memory is not None:
            self.memory.write(self.plan, self.space, outcome, self.device)
        return outcome


def begin_warmup(
    resolved: Resolved,
    catalogs: Catalogs,
    options_of: OptionsOf,
    report: StartReport,
    memory: WarmupMemory | None = None,
) -> WarmupStage:
    """The planned policy's warmup, already compiling in the background; without ``memory`` nothing is remembered."""
    plan = resolved.plan
    spec = catalogs.warmup_policies.get(plan.warmup.name)
    space = plan_launch_space(resolved, catalogs, options_of)
    device = WarmupDevice(space)
    run = WarmupRun(
        name=spec.name,
        policy=spec.create(options_of(spec.options)),
        plan=plan,
        space=space,
        known=Known() if memory is None else lambda: memory.recall(plan, space),
        device=device,
        report=lambda fraction, words: report("warmup", fraction, words),
    )
    run.start_compile()
    return WarmupStage(plan, space, device, run, memory)
