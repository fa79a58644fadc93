"""The gated delta net between its convolution and its output norm."""

from __future__ import annotations

from torch import Tensor

from freetoken.ops.gated_delta import gated_delta
from freetoken.ops.gates import delta_gates
from freetoken.ops.norms import l2norm


def delta_net(
    mixed: Tensor,
    ba: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    eps: float,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    prefix_lens: Tensor,
) -> Tensor:
    """``mixed [T, 2 Hk Dk + Hv Dv]`` holds queries, keys and values; → ``[T, Hv, Dv]``, ``state`` updated in place.

    ``l2norm`` of queries and keys, rounded to the compute dtype, ``delta_gates``, then ``gated_delta``. The head sizes
    follow from ``state [slots, Hv, Dk, Dv]``.
    """
    _, v_heads, k_dim, v_dim = state.shape
    both, v = mixed.split_with_sizes((mixed.shape[1] - v_heads * v_dim, v_heads * v_dim), dim=-1)
    both = l2norm(both.reshape(mixed.shape[0], -1, k_dim), eps)  # queries and keys in one call
    k_heads = both.shape[1] // 2
    beta, decay = delta_gates(ba, rate, dt_bias)
    return gated_delta(
        both[:, :k_heads], both[:, k_heads:], v.view(-1, v_heads, v_dim), decay, beta, state, query_starts,
        state_slots, prefix_lens,
    )  # fmt: skip
