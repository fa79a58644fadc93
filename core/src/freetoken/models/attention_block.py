"""Softmax attention over paged keys and values: sizes, parameters, ops, and the block that runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from freetoken.models.columns import split_columns
from freetoken.models.rope import Rope
from freetoken.models.weight_names import Names, Parameter
from freetoken.plugin.protocols import AttentionBackend, ModelParts, Step
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.ops import OpShape

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "attention"
"""The name of the one attention group these families have."""


@frozen
class Attention:
    """One layer's attention. ``norm_offset`` is added to stored norm weights; ``output_gate`` doubles the query rows.

    ``qk_norm`` normalises each query and key head (Henry et al. 2020, arXiv:2010.04245). With ``output_gate`` each head
    of ``q_proj`` is followed by its gate, whose sigmoid scales the head's output (Qiu et al. 2025, arXiv:2505.06708).
    """

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    norm_offset: float = 0.0
    stored_prefix: str = "self_attn."

    @property
    def q_rows(self) -> int:
        """Rows of ``q_proj``."""
        return self.q_heads * self.head_dim * (2 if self.output_gate else 1)

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def cache(self, dtype: str) -> PagedKV:
        return PagedKV(self.kv_heads, self.head_dim, self.head_dim, dtype)

    def parameters(self, names: Names) -> tuple[Parameter, ...]:
        q = ("q_proj", self.q_rows, self.q_heads)
        k = ("k_proj", self.kv_rows, self.kv_heads)
        v = ("v_proj", self.kv_rows, 0)
        found = [
            names.linear("qkv", q, k, v, cols=self.hidden),
            names.linear("o", ("o_proj", self.hidden, 0), cols=self.q_heads * self.head_dim),
        ]
        if self.qkv_bias:
            found += [names.vector(f"{n}_bias", f"{n}_proj.bias", (rows,)) for n, rows in self._biases]
        if self.o_bias:
            found.append(names.vector("o_bias", "o_proj.bias", (self.hidden,)))
        if self.qk_norm:
            found += [
                names.vector(f"{n}_norm", f"{n}_norm.weight", (self.head_dim,), add=self.norm_offset)
                for n in ("q", "k")
            ]
        return tuple(found)

    @property
    def _biases(self) -> tuple[tuple[str, int], ...]:
        return (("q", self.q_rows), ("k", self.kv_rows), ("v", self.kv_rows))

    def op_shapes(self, dtype: str) -> tuple[OpShape, ...]:
        qkv = OpShape("linear", dtype, rows=self.q_rows + 2 * self.kv_rows, cols=self.hidden)
        o = OpShape("linear", dtype, rows=self.hidden, cols=self.q_heads * self.head_dim)
        gate = (self.gate_shape(dtype),) if self.output_gate else ()
        return (qkv, self.rope_shape(dtype), *gate, o)

    def rope_shape(self, dtype: str) -> OpShape:
        """Head norms, rotation and the write into the pools; q, k and v may be strided."""
        return OpShape(
            "rope_write",
            dtype,
            cols=self.head_dim if self.qk_norm else 0,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_dim=self.head_dim,
            rotary_dim=self.rope.rotary_dim,
        )

    def gate_shape(self, dtype: str) -> OpShape:
        return OpShape("sigmoid_gate", dtype, cols=self.head_dim, q_heads=self.q_heads)

    def build(self, names: Names, parts: ModelParts, cos_sin: Tensor) -> AttentionBlock:
        return AttentionBlock(self, names, parts, cos_sin)


class AttentionBlock:
    """Projections around head norms, rotary embedding and cache write, and around an attention backend."""

    def __init__(self, sizes: Attention, names: Names, parts: ModelParts, cos_sin: Tensor) -> None:
        assert names.layer is not None, "attention belongs to a layer"
        self.layer = names.layer
        self.sizes = sizes
        self.cos_sin = cos_sin
        weights, ops, prefix = parts.weights, parts.ops, names.slot
        self.qkv, self.o = weights[prefix + "qkv"], weights[prefix + "o"]
        self.qkv_bias = _qkv_bias(weights, prefix) if sizes.qkv_bias else None
        self.o_bias = weights[prefix + "o_bias"] if sizes.o_bias else None
        self.q_norm = weights[prefix + "q_norm"] if sizes.qk_norm else None
        self.k_norm = weights[prefix + "k_norm"] if sizes.qk_norm else None
        self.rope_write = ops.bind(sizes.rope_shape(parts.dtype))
        self.output_gate = ops.bind(sizes.gate_shape(parts.dtype)) if sizes.output_gate else None
        self.backend: AttentionBackend = parts.attention[GROUP]

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """``x [T, H]``, normed → ``[T, H]``. Q, K and V may be views whose token rows are wider than the heads."""
        q, k, v, gate = self._project(x)
        k_pool, v_pool = step.caches[self.layer]
        q = self.rope_write(
            q, k, v, self.q_norm, self.k_norm, self.sizes.eps, step.batch.positions, self.cos_sin, k_pool, v_pool,
            step.batch.kv_slots,
        )  # fmt: skip
        out = self.backend.forward(q, k_pool, v_pool, self.layer, step.plans[GROUP])
        if gate is not None:
            assert self.output_gate is not None, "a gate was projected, so its op was asked for"
            out = self.output_gate(out, gate)
        y: Tensor = self.o(out.reshape(out.shape[0], -1))
        return y if self.o_bias is None else y + self.o_bias

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """``q [T, Hq, D]``, ``k``, ``v [T, Hkv, D]`` and, where there is one, the output gate ``[T, Hq, D]``."""
        s = self.sizes
        packed: Tensor = self.qkv(x)
        if self.qkv_bias is not None:
            packed = packed + self.qkv_bias
        q, k, v = split_columns(packed, s.q_rows, s.kv_rows, s.kv_rows)
        k, v = k.view(-1, s.kv_heads, s.head_dim), v.view(-1, s.kv_heads, s.head_dim)
        gate = None
        if s.output_gate:
            q, gate = q.view(-1, s.q_heads, 2 * s.head_dim).chunk(2, dim=-1)
        else:
            q = q.view(-1, s.q_heads, s.head_dim)
        return q, k, v, gate


def _qkv_bias(weights: Mapping[str, Any], prefix: str) -> Tensor:
    import torch

    return torch.cat([weights[f"{prefix}{n}_bias"] for n in ("q", "k", "v")])
