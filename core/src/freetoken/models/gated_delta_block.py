"""Gated delta net, linear attention with a recurrent state (Yang et al. 2024, arXiv:2412.06464)."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from attrs import frozen

from freetoken.models.columns import split_columns
from freetoken.models.weight_names import Names, Parameter
from freetoken.plugin.protocols import ModelParts, Step
from freetoken.vocab.cache_spec import RecurrentState
from freetoken.vocab.ops import OpShape

if TYPE_CHECKING:
    from torch import Tensor

    from freetoken.vocab.batch import Batch

L2_EPS = 1e-6
"""Added to the squared length of query and key heads."""


@frozen
class GatedDelta:
    """Sizes of one gated delta net: ``k_heads`` query and key heads of ``k_dim``, ``v_heads`` value heads of ``v_dim``.

    ``conv_width`` is that of the causal convolution over the stacked query, key and value channels. ``by_key_head``
    says that files keep one projection for q, k, v, z and one for b, a, whose rows go key head by key head.
    """

    hidden: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    eps: float
    by_key_head: bool = False
    stored_prefix: str = "linear_attn."

    @property
    def k_rows(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def v_rows(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.k_rows + self.v_rows

    def cache(self, dtype: str) -> RecurrentState:
        """The convolution's last inputs and the delta rule's matrix for each head; float32 whatever is computed in."""
        return RecurrentState(((self.channels, self.conv_width - 1), (self.v_heads, self.k_dim, self.v_dim)), "float32")

    def parameters(self, names: Names) -> tuple[Parameter, ...]:
        return (
            *(self._mixed_projections(names) if self.by_key_head else self._projections(names)),
            names.vector("conv", "conv1d.weight", (self.channels, 1, self.conv_width)),
            names.vector("a_log", "A_log", (self.v_heads,), dtype="float32"),
            names.vector("dt_bias", "dt_bias", (self.v_heads,), dtype="float32"),
            names.vector("norm", "norm.weight", (self.v_dim,)),
            names.linear("out", ("out_proj", self.hidden, 0), cols=self.v_rows),
        )

    def _projections(self, names: Names) -> tuple[Parameter, Parameter]:
        # b and a stay apart from the rest: quantised checkpoints keep these few rows unquantised.
        qkv, z = ("in_proj_qkv", self.channels, 0), ("in_proj_z", self.v_rows, 0)
        beta, decay = ("in_proj_b", self.v_heads, 0), ("in_proj_a", self.v_heads, 0)
        return names.linear("qkvz", qkv, z, cols=self.hidden), names.linear("ba", beta, decay, cols=self.hidden)

    def _mixed_projections(self, names: Names) -> tuple[Parameter, Parameter]:
        share = self.v_heads // self.k_heads
        qkvz = _by_kind(self.k_heads, (self.k_dim, self.k_dim, share * self.v_dim, share * self.v_dim))
        ba = _by_kind(self.k_heads, (share, share))
        return (
            names.rows("qkvz", "in_proj_qkvz", qkvz, self.hidden),
            names.rows("ba", "in_proj_ba", ba, self.hidden),
        )

    def op_shapes(self, dtype: str) -> tuple[OpShape, ...]:
        return (
            OpShape("linear", dtype, rows=self.channels + self.v_rows, cols=self.hidden),
            OpShape("linear", dtype, rows=2 * self.v_heads, cols=self.hidden),
            self.conv_shape(dtype),
            self.delta_shape(dtype),
            self.norm_shape(dtype),
            OpShape("linear", dtype, rows=self.hidden, cols=self.v_rows),
        )

    def conv_shape(self, dtype: str) -> OpShape:
        return OpShape("causal_conv", dtype, rows=self.channels, width=self.conv_width)

    def delta_shape(self, dtype: str) -> OpShape:
        """``q_heads`` counts query and key heads, ``kv_heads`` value heads."""
        return OpShape(
            "delta_net", dtype, q_heads=self.k_heads, kv_heads=self.v_heads, head_dim=self.k_dim, v_dim=self.v_dim
        )

    def norm_shape(self, dtype: str) -> OpShape:
        return OpShape("gated_rms_norm", dtype, cols=self.v_dim, kv_heads=self.v_heads, v_dim=self.v_dim)

    def build(self, names: Names, parts: ModelParts, prefixes: PrefixLens) -> GatedDeltaBlock:
        return GatedDeltaBlock(self, names, parts, prefixes)


class PrefixLens:
    """Each sequence's cached tokens ``[B] i32`` of the batch that was embedded last: counted once for all layers."""

    def __init__(self) -> None:
        self._known: tuple[Batch, Tensor] | None = None

    def begin(self, batch: Batch) -> None:
        """Count them anew, at the start of a pass: a captured pass must count its own, whatever one before it held."""
        self._known = (batch, self._count(batch))

    def of(self, batch: Batch) -> Tensor:
        """Those of ``batch``, counted now where another one was embedded since."""
        if self._known is not None and self._known[0] is batch:
            return self._known[1]
        return self._count(batch)

    def _count(self, batch: Batch) -> Tensor:
        # From tensors, not from the host's integers: a replayed graph sees only tensors.
        return batch.context_lens - batch.query_starts.diff()


class GatedDeltaBlock:
    """The gated delta net as it runs."""

    def __init__(self, sizes: GatedDelta, names: Names, parts: ModelParts, prefixes: PrefixLens) -> None:
        assert names.layer is not None, "a recurrent state belongs to a layer"
        self.layer, self.sizes, self.prefixes = names.layer, sizes, prefixes
        weights, ops, dtype, prefix = parts.weights, parts.ops, parts.dtype, names.slot
        self.qkvz, self.ba, self.out = weights[prefix + "qkvz"], weights[prefix + "ba"], weights[prefix + "out"]
        self.conv_weight: Tensor = weights[prefix + "conv"].view(sizes.channels, sizes.conv_width)
        self.rate: Tensor = -weights[prefix + "a_log"].exp()
        self.dt_bias: Tensor = weights[prefix + "dt_bias"]
        self.norm_weight: Tensor = weights[prefix + "norm"]
        self.conv = ops.bind(sizes.conv_shape(dtype))
        self.delta, self.norm = ops.bind(sizes.delta_shape(dtype)), ops.bind(sizes.norm_shape(dtype))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """``x [T, H]``, normed → ``[T, H]``. Q, K, V and Z may be views whose token rows are wider than the heads."""
        s, batch = self.sizes, step.batch
        conv_state, delta_state = step.caches[self.layer]
        where = (batch.query_starts, batch.state_slots, self.prefixes.of(batch))
        mixed, z = split_columns(self.qkvz(x), s.channels, s.v_rows)
        mixed = self.conv(mixed, self.conv_weight, conv_state, *where)
        out = self.delta(mixed, self.ba(x), self.rate, self.dt_bias, L2_EPS, delta_state, *where)
        out = self.norm(out, z.view(-1, s.v_heads, s.v_dim), self.norm_weight, s.eps)
        y: Tensor = self.out(out.reshape(-1, s.v_rows))
        return y


def _by_kind(heads: int, sizes: tuple[int, ...]) -> list[range]:
    """Row ranges of a projection that goes head by head, in the order kind by kind."""
    return [
        range(head * sum(sizes) + start, head * sum(sizes) + start + size)
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
        for head in range(heads)
    ]
