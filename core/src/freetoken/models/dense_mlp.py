"""The gated feed-forward block ``down(silu(gate(x)) · up(x))`` (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from freetoken.models.weight_names import Names, Parameter
from freetoken.plugin.protocols import ModelParts
from freetoken.vocab.ops import OpShape

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class DenseMLP:
    """Sizes of one feed-forward block."""

    hidden: int
    intermediate: int
    stored_prefix: str = "mlp."

    def parameters(self, names: Names) -> tuple[Parameter, ...]:
        gate, up = ("gate_proj", self.intermediate, 0), ("up_proj", self.intermediate, 0)
        return (
            names.linear("gate_up", gate, up, cols=self.hidden),
            names.linear("down", ("down_proj", self.hidden, 0), cols=self.intermediate),
        )

    def op_shapes(self, dtype: str) -> tuple[OpShape, ...]:
        return (*self.product_shapes(dtype), self.add_shape(dtype))

    def product_shapes(self, dtype: str) -> tuple[OpShape, ...]:
        """Without the addition to the residual stream: what a shared expert is made of."""
        return (
            OpShape("linear", dtype, rows=2 * self.intermediate, cols=self.hidden),
            self.activation_shape(dtype),
            OpShape("linear", dtype, rows=self.hidden, cols=self.intermediate),
        )

    def activation_shape(self, dtype: str) -> OpShape:
        return OpShape("silu_and_mul", dtype, intermediate=self.intermediate)

    def add_shape(self, dtype: str) -> OpShape:
        return OpShape("residual_add", dtype, cols=self.hidden)

    def build(self, names: Names, parts: ModelParts) -> DenseBlock:
        return DenseBlock(self, names, parts)


class FeedForward:
    """The products and the activation between them."""

    def __init__(self, sizes: DenseMLP, names: Names, parts: ModelParts) -> None:
        self.gate_up, self.down = parts.weights[names.slot + "gate_up"], parts.weights[names.slot + "down"]
        self.activation = parts.ops.bind(sizes.activation_shape(parts.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """``[T, H] → [T, H]``."""
        out: Tensor = self.down(self.activation(self.gate_up(x)))
        return out


class DenseBlock(FeedForward):
    """The feed-forward block as it runs."""

    def __init__(self, sizes: DenseMLP, names: Names, parts: ModelParts) -> None:
        super().__init__(sizes, names, parts)
        self.add = parts.ops.bind(sizes.add_shape(parts.dtype))

    def begin(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Nothing is waited for: the call that returns computes all, and adds it to the residual stream ``[T, H]``."""

        def end(residual: Tensor) -> Tensor:
            out: Tensor = self.add(self.forward(x), residual, None, None)
            return out

        return end
