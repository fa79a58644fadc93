"""The warmup policy ``none``: no steps. Graphs are captured all the same, since capture is the core's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import WarmupPolicySpec
from freetoken.vocab.launch import LaunchSpace
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Known, WarmupStep


class NoWarmup:
    def steps(self, plan: Plan, launch_space: LaunchSpace, known: Known) -> Iterable[WarmupStep]:
        return ()


@hookimpl
def freetoken_warmup_policies() -> Sequence[WarmupPolicySpec]:
    return (
        WarmupPolicySpec(
            name="none",
            summary="warm nothing: first requests may wait for compiles and module loads",
            create=lambda _: NoWarmup(),
        ),
    )
