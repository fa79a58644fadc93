"""The plugin: the MoE strategy ``offload`` and its options. Imports no library."""

from __future__ import annotations

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import MoESetup, MoEStrategy
from freetoken.plugin.specs import MoEStrategySpec, OptionsSpec
from freetoken_moe_offload.budget import NAME, budget
from freetoken_moe_offload.launches import launches
from freetoken_moe_offload.options import OffloadOptions
from freetoken_moe_offload.probe import probe


def create(setup: MoESetup) -> MoEStrategy:
    from freetoken_moe_offload.strategy import OffloadExperts

    return OffloadExperts(setup)


SPEC = MoEStrategySpec(
    name=NAME,
    summary="experts in host memory, a cache of them on the device",
    devices=frozenset({"cpu", "cuda"}),
    budget=budget,
    create=create,
    priority=-10,
    graphs=True,
    layer_major=True,
    probe=probe,
    launches=launches,
    options=OffloadOptions,
)


@hookimpl
def freetoken_moe_strategies() -> tuple[MoEStrategySpec, ...]:
    return (SPEC,)


@hookimpl
def freetoken_options() -> tuple[OptionsSpec, ...]:
    summary = "where experts lie when they do not all fit the device"
    return (OptionsSpec(owner="moe-offload", cls=OffloadOptions, summary=summary),)
