"""All that happens to queries, keys and values between their projection and attention."""

from __future__ import annotations

from torch import Tensor

from freetoken.ops.kv_write import write_kv
from freetoken.ops.norms import rms_norm
from freetoken.ops.rope import rope


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    kv_slots: Tensor,
) -> Tensor:
    """Norm each head of ``q [T, Hq, D]`` and ``k [T, Hkv, D]`` by its weight ``[D]`` where there is one, rotate both,
    and write ``k`` and ``v [T, Hkv, Dv]`` into the pools, in place. → the rotated ``q [T, Hq, D]``.

    The norm is rounded to the compute dtype before it is rotated, so the result is that of ``rms_norm``, ``rope`` and
    ``write_kv`` one after another.
    """
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    q, k = rope(q, k, positions, cos_sin)
    write_kv(k, v, k_pool, v_pool, kv_slots)
    return q
