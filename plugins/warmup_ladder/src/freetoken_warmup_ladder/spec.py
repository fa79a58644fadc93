"""The plugin: the warmup policy ``ladder`` and its options. Imports neither torch nor triton."""

from __future__ import annotations

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import WarmupPolicy
from freetoken.plugin.specs import OptionsSpec, WarmupPolicySpec
from freetoken_warmup_ladder.options import LadderOptions

POLICY = "ladder"
OWNER = "warmup-ladder"


def create(options: object) -> WarmupPolicy:
    """The policy with its options; the defaults where none are given."""
    from freetoken_warmup_ladder.policy import Ladder

    return Ladder(options if isinstance(options, LadderOptions) else LadderOptions())


@hookimpl
def freetoken_warmup_policies() -> tuple[WarmupPolicySpec, ...]:
    return (
        WarmupPolicySpec(
            name=POLICY,
            summary="the smallest set of steps after which no request waits for a compile or a module load",
            create=create,
            priority=10,
            options=LadderOptions,
        ),
    )


@hookimpl
def freetoken_options() -> tuple[OptionsSpec, ...]:
    return (OptionsSpec(owner=OWNER, cls=LadderOptions, summary="the warmup policy ladder"),)
