"""The hooks. Three kinds and no fourth.

*Offers* return frozen specs. *Decides* pick one of the candidates that already fit; the first answer counts, ``None``
abstains. *Tells* inform; what they return is ignored. Hooks run at start-up only. An implementation may take any subset
of the arguments, by name, without defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from freetoken.plugin.commands import CommandGroup
from freetoken.plugin.markers import hookspec
from freetoken.plugin.specs import (
    AttentionBackendSpec,
    Candidate,
    KernelSpec,
    ModelFamilySpec,
    MoEStrategySpec,
    OptionsSpec,
    WarmupPolicySpec,
    WeightFormatSpec,
)
from freetoken.vocab.hardware import Hardware
from freetoken.vocab.plan import Plan, Sizing


@hookspec
def freetoken_attention_backends() -> Iterable[AttentionBackendSpec]:  # type: ignore[empty-body]
    """Offer attention backends."""


@hookspec
def freetoken_moe_strategies() -> Iterable[MoEStrategySpec]:  # type: ignore[empty-body]
    """Offer ways to keep and compute experts."""


@hookspec
def freetoken_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Offer implementations of named ops."""


@hookspec
def freetoken_warmup_policies() -> Iterable[WarmupPolicySpec]:  # type: ignore[empty-body]
    """Offer warmup policies."""


@hookspec
def freetoken_model_families() -> Iterable[ModelFamilySpec]:  # type: ignore[empty-body]
    """Offer model families."""


@hookspec
def freetoken_weight_formats() -> Iterable[WeightFormatSpec]:  # type: ignore[empty-body]
    """Offer weight formats."""


@hookspec
def freetoken_options() -> Iterable[OptionsSpec]:  # type: ignore[empty-body]
    """Offer options: one frozen attrs class per owner."""


@hookspec(firstresult=True)
def freetoken_choose(kind: str, subject: str, candidates: Sequence[Candidate], hardware: Hardware) -> str | None:
    """Pick one of ``candidates`` (ranked, all fit) for ``subject`` by name, or abstain with ``None``."""


@hookspec
def freetoken_add_commands(commands: CommandGroup) -> None:
    """Told once, before the command line is parsed: add commands to ``commands``."""


@hookspec
def freetoken_plan_resolved(plan: Plan) -> None:
    """Told when the plan stands, in the engine's process, before anything is allocated."""


@hookspec
def freetoken_ready(plan: Plan, sizing: Sizing) -> None:
    """Told when the engine is about to serve."""


@hookspec
def freetoken_shutdown(plan: Plan) -> None:
    """Told when the engine stops, also after an error."""
