"""The reference of every op by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from freetoken.ops.activation import silu_and_mul
from freetoken.ops.causal_conv import causal_conv
from freetoken.ops.delta_net import delta_net
from freetoken.ops.embedding import embedding
from freetoken.ops.experts import experts
from freetoken.ops.gated_delta import gated_delta
from freetoken.ops.gates import delta_gates, residual_add, sigmoid_gate
from freetoken.ops.kv_write import write_kv
from freetoken.ops.linear import linear
from freetoken.ops.norms import add_rms_norm, gated_rms_norm, l2norm, rms_norm
from freetoken.ops.rope import rope
from freetoken.ops.rope_write import rope_write
from freetoken.ops.routing import router_topk
from freetoken.ops.sampling import sample

REFERENCE: Mapping[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (
        embedding, linear, rms_norm, add_rms_norm, gated_rms_norm, l2norm, rope, silu_and_mul, write_kv, rope_write,
        router_topk,
        experts, causal_conv, gated_delta, residual_add, sigmoid_gate, delta_gates,
        delta_net, sample,
    )
}  # fmt: skip
