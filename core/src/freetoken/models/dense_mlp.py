"""The gated feed-forward block ``down(silu(gate(x)) · up(x))`` (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
        return (
            OpShape("linear", dtype, rows=2 * self.intermediate, cols=self.hidden),
            self.activation_shape(dtype),
            OpShape("linear", dtype, rows=self.hidden, cols=self.intermediate),
        )

    def activation_shape(self, dtype: str) -> OpShape:
        return OpShape("silu_and_mul", dtype, intermediate=self.intermediate)

    def build(self, names: Names, parts: ModelParts) -> DenseBlock:
        return DenseBlock(self, names, parts)


class DenseBlock:
    """The feed-forward block as it runs."""

    def __init__(self, sizes: DenseMLP, names: Names, parts: ModelParts) -> None:
        self.gate_up, self.down = parts.weights[names.slot + "gate_up"], parts.weights[names.slot + "down"]
        self.activation = parts.ops.bind(sizes.activation_shape(parts.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """``[T, H] → [T, H]``."""
        out: Tensor = self.down(self.activation(self.gate_up(x)))
        return out

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """Nothing is waited for: the call that returns is ``forward``."""
        return partial(self.forward, x)
