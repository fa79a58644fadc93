"""The scatter of new keys and values into the paged pools."""

from __future__ import annotations

from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, kv_slots: Tensor) -> None:
    """Write ``k [T, Hkv, Dk]`` and ``v [T, Hkv, Dv]`` to rows ``kv_slots [T] i64`` (page id × P + offset) of the pools
    ``[pages, P, Hkv, D]``, in place, cast to the pools' dtype.

    Raises ``RuntimeError`` where a pool's pages are not evenly spaced, since a copy would be written instead.
    """
    for new, pool in ((k, k_pool), (v, v_pool)):
        rows = pool.view(-1, *pool.shape[2:])
        rows.index_copy_(0, kv_slots, new.to(pool.dtype))
