"""The policy: the cap and the workers are decided here, the steps are derived from the launch space."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from attrs import frozen

from freetoken.vocab.launch import LaunchSpace
from freetoken.vocab.plan import Decision, Plan
from freetoken.vocab.warmup import Known, WarmupStep
from freetoken.warmup.compile_worker import default_workers
from freetoken.warmup.cover import cover
from freetoken_warmup_ladder.options import LadderOptions

_log = logging.getLogger("freetoken.warmup")


@frozen
class Ladder:
    """Implements ``freetoken.plugin.protocols.WarmupPolicy``."""

    options: LadderOptions

    def steps(self, plan: Plan, launch_space: LaunchSpace, known: Known) -> Iterable[WarmupStep]:
        """An irredundant set of steps that warms every step of the engine up to the cap; none when told to skip."""
        if self.options.skip:
            _log.info("warmup policy ladder: no steps: --skip-prefill-warmup was given; graphs are still captured")
            return ()
        cap, workers = decide_cap(self.options, plan), decide_workers(self.options, plan)
        return cover(launch_space, known, cap.value, workers.value)


def decide_cap(options: LadderOptions, plan: Plan) -> Decision[int]:
    """The most tokens of a step that is warmed: min(prefill chunk, longest request, the option)."""
    reachable = plan.step_space.tokens.high
    if options.max_tokens is not None and options.max_tokens < reachable:
        return Decision("max_tokens", options.max_tokens, "--warmup-ladder-max-tokens")
    return Decision("max_tokens", reachable, "the largest step there is")


def decide_workers(options: LadderOptions, plan: Plan) -> Decision[int]:
    """How many compile processes: as told, or min(cores, free memory ÷ 1.5 GB)."""
    if options.workers is not None:
        return Decision("workers", options.workers, "--warmup-ladder-workers")
    hardware = plan.hardware
    return Decision(
        "workers", default_workers(hardware.cores, hardware.host_free_bytes), "the cores, as far as memory allows"
    )
