"""A mixture of experts: router, chosen experts through the MoE strategy, and a shared expert where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from freetoken.models.dense_mlp import DenseMLP, FeedForward
from freetoken.models.expert_layout import ONE_EACH, ExpertLayout, ExpertSizes, find_layout
from freetoken.models.weight_names import Names, Parameter
from freetoken.plugin.protocols import ModelParts, MoEStrategy
from freetoken.vocab.ops import OpShape
from freetoken.vocab.weight import CheckpointIndex, WeightSlot

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class MoE:
    """Sizes of one expert layer. ``shared_intermediate`` is 0 without a shared expert, whose sigmoid gate scales it.

    ``renormalise`` makes the chosen weights sum to one. ``usual_layout`` is how the family's checkpoints mostly keep
    experts.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    renormalise: bool
    shared_intermediate: int = 0
    usual_layout: ExpertLayout = ONE_EACH

    @property
    def sizes(self) -> ExpertSizes:
        return ExpertSizes(self.experts, self.hidden, self.intermediate)

    @property
    def expert_elements(self) -> int:
        """Weights of all experts of the layer."""
        return 3 * self.experts * self.hidden * self.intermediate

    @property
    def shared(self) -> DenseMLP | None:
        return DenseMLP(self.hidden, self.shared_intermediate) if self.shared_intermediate else None

    def parameters(self, names: Names) -> tuple[Parameter, ...]:
        router = names.linear("router", ("gate", self.experts, 0), cols=self.hidden)
        if self.shared is None:
            return (router,)
        gate = names.linear("shared_gate", ("shared_expert_gate", 1, 0), cols=self.hidden)
        return (router, gate, *self.shared.parameters(_shared_names(names)))

    def layout(self, prefix: str, index: CheckpointIndex) -> ExpertLayout:
        """How ``index`` keeps the experts of the layer under ``prefix``."""
        return find_layout(index, prefix, self.sizes, self.usual_layout)

    def expert_slots(self, layer: int, prefix: str, layout: ExpertLayout) -> tuple[WeightSlot, ...]:
        """One slot for each expert of the layer under ``prefix``."""
        shape = (self.hidden, self.intermediate)
        return tuple(
            WeightSlot(
                f"layers.{layer}.experts.{e}",
                "experts",
                layout.sources(prefix, e, self.sizes),
                shape,
                layer=layer,
                expert=e,
            )
            for e in range(self.experts)
        )

    def op_shapes(self, dtype: str) -> tuple[OpShape, ...]:
        router = OpShape("linear", dtype, rows=self.experts, cols=self.hidden)
        shapes = (router, self.topk_shape(dtype), self.experts_shape(dtype))
        if self.shared is None:
            return (*shapes, self.add_shape(dtype))
        gate = OpShape("linear", dtype, rows=1, cols=self.hidden)
        return (*shapes, *self.shared.product_shapes(dtype), gate, self.add_shape(dtype))

    def add_shape(self, dtype: str) -> OpShape:
        return OpShape("residual_add", dtype, rows=int(self.shared is not None), cols=self.hidden)

    def topk_shape(self, dtype: str) -> OpShape:
        return OpShape("router_topk", dtype, experts=self.experts, top_k=self.top_k)

    def experts_shape(self, dtype: str) -> OpShape:
        return OpShape(
            "experts", dtype, cols=self.hidden, experts=self.experts, top_k=self.top_k, intermediate=self.intermediate
        )

    def build(self, names: Names, parts: ModelParts) -> MoEBlock:
        return MoEBlock(self, names, parts)


class MoEBlock:
    """The expert layer as it runs: the shared expert computes while the strategy works on the chosen ones."""

    def __init__(self, sizes: MoE, names: Names, parts: ModelParts) -> None:
        assert names.layer is not None, "experts belong to a layer"
        assert parts.moe is not None, "a model with experts needs a MoE strategy"
        self.layer, self.sizes = names.layer, sizes
        self.strategy: MoEStrategy = parts.moe
        self.router = parts.weights[names.slot + "router"]
        self.topk = parts.ops.bind(sizes.topk_shape(parts.dtype))
        self.add = parts.ops.bind(sizes.add_shape(parts.dtype))
        self.shared = FeedForward(sizes.shared, _shared_names(names), parts) if sizes.shared else None
        self.shared_gate = parts.weights[names.slot + "shared_gate"] if sizes.shared else None

    def begin(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Routes and lets the strategy start; the call that returns computes the shared expert, finishes, and adds all
        to the residual stream ``[T, H]`` that it is given."""
        weights, experts = self.topk(self.router(x), self.sizes.top_k, self.sizes.renormalise)
        pending = self.strategy.start(self.layer, x, weights, experts)

        def end(residual: Tensor) -> Tensor:
            shared = gate = None
            if self.shared is not None and self.shared_gate is not None:
                shared, gate = self.shared.forward(x), self.shared_gate(x)
            out: Tensor = self.add(self.strategy.finish(pending), residual, shared, gate)
            return out

        return end

    def foresee(self, x: Tensor) -> tuple[int, Tensor]:
        """This layer's number and the experts ``[T, K]`` that it would choose for ``x [T, H]``."""
        _, experts = self.topk(self.router(x), self.sizes.top_k, self.sizes.renormalise)
        return self.layer, experts


def _shared_names(names: Names) -> Names:
    return Names(names.slot + "shared.", names.stored + "shared_expert.", names.layer)
