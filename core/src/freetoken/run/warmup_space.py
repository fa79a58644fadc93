"""The launch space of a resolved plan."""

from __future__ import annotations

from attrs import frozen

from freetoken.config.resolve import Resolved
from freetoken.plugin.catalog import Catalogs
from freetoken.run.create import planned_moe
from freetoken.run.loader import OptionsOf
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launch, Launches, StepPoint
from freetoken.vocab.ops import OpShape
from freetoken.warmup.launch_space import DeclaredLaunchSpace, attention_shape, build_launch_space
from freetoken.warmup.parts import layer_of, model_parts


def plan_launch_space(
    resolved: Resolved, catalogs: Catalogs, options_of: OptionsOf = lambda cls: None if cls is None else cls()
) -> DeclaredLaunchSpace:
    """What every part of the planned model can launch, attention and the MoE strategy included."""
    plan = resolved.plan
    launches = {shape: spec.launches for shape, spec in resolved.kernels.items()}
    moe = planned_moe(resolved, catalogs, options_of)
    if moe is not None and moe[0].launches is not None:
        strategy = moe[0].launches(moe[1])
        for shape in [shape for shape in launches if shape.op == "experts"]:
            kernel = launches[shape]
            launches[shape] = None if kernel is None else _Both(strategy, kernel)  # opaque where the kernel is
    attention: dict[int, tuple[OpShape, Launches | None]] = {}
    for group, choice in zip(plan.model.attention, plan.attention, strict=True):
        backend = catalogs.attention_backends.get(choice.name)
        shape = attention_shape(group, plan.dtype, plan.page_tokens)
        attention.update(dict.fromkeys(group.layers, (shape, backend.launches)))
    return build_launch_space(plan.step_space, model_parts(resolved.needs.parts, launches, attention), plan.device)


@frozen
class _Both:
    """What a strategy launches, and then the experts' kernel."""

    strategy: Launches
    kernel: Launches

    def __call__(self, point: StepPoint, shape: OpShape, device: Device) -> tuple[Launch, ...]:
        return (*self.strategy(point, shape, device), *self.kernel(point, shape, device))


def kind_layers(space: DeclaredLaunchSpace) -> tuple[int, ...]:
    """One layer of each kind: the first, by index."""
    found = (layer_of(kind) for kind in space.kinds)
    return tuple(index for index in found if index is not None)
