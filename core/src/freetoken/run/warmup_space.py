"""The launch space of a resolved plan."""

from __future__ import annotations

from freetoken.config.resolve import Resolved
from freetoken.plugin.catalog import Catalogs
from freetoken.vocab.launch import Launches
from freetoken.vocab.ops import OpShape
from freetoken.warmup.launch_space import DeclaredLaunchSpace, attention_shape, build_launch_space
from freetoken.warmup.parts import layer_of, model_parts


def plan_launch_space(resolved: Resolved, catalogs: Catalogs) -> DeclaredLaunchSpace:
    """What every part of the planned model can launch, attention included."""
    plan = resolved.plan
    launches = {shape: spec.launches for shape, spec in resolved.kernels.items()}
    attention: dict[int, tuple[OpShape, Launches | None]] = {}
    for group, choice in zip(plan.model.attention, plan.attention, strict=True):
        backend = catalogs.attention_backends.get(choice.name)
        shape = attention_shape(group, plan.dtype, plan.page_tokens)
        attention.update(dict.fromkeys(group.layers, (shape, backend.launches)))
    return build_launch_space(plan.step_space, model_parts(resolved.needs.parts, launches, attention), plan.device)


def kind_layers(space: DeclaredLaunchSpace) -> tuple[int, ...]:
    """One layer of each kind: the first, by index."""
    found = (layer_of(kind) for kind in space.kinds)
    return tuple(index for index in found if index is not None)
