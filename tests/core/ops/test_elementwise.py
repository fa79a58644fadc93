"""The activation, the cache write, the embedding and the linear op: small ops, each against its definition."""

from __future__ import annotations

import pytest
import torch

from freetoken.ops import linear as linear_module
from freetoken.ops.activation import silu_and_mul
from freetoken.ops.embedding import embedding
from freetoken.ops.kv_write import write_kv
from freetoken.ops.linear import linear
from freetoken.testing.fakes import normal
from freetoken.testing.tolerances import assert_close

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: str) -> None:
    """Oracle: x · σ(x) · y in float64."""
    x = 3 * normal(1, dtype=getattr(torch, dtype))(5, 48)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: str) -> None:
    """Oracle: the product in float64."""
    randn = normal(2, dtype=getattr(torch, dtype))
    x, w = randn(6, 96), randn(40, 96) / 10
    assert_close(linear(x, w), x.double() @ w.double().T, dtype, 96)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_by_slices(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the product in float64, where the last slice is shorter; one row and many rows go whole."""
    monkeypatch.setattr(linear_module, "SLICED_BYTES", 0)
    monkeypatch.setattr(linear_module, "SLICE_ROWS", 16)
    randn = normal(5, dtype=getattr(torch, dtype))
    w = randn(70, 96) / 10
    for tokens in (1, 2, 64, 65):
        x = randn(tokens, 96)
        assert_close(linear(x, w), x.double() @ w.double().T, dtype, 96, f"{tokens} tokens")


def test_embedding_takes_rows() -> None:
    """Oracle: indexing."""
    w, ids = normal(3)(11, 4), torch.tensor([10, 0, 3, 3])
    assert torch.equal(embedding(ids, w), w[ids])


@pytest.mark.parametrize("pool_dtype", DTYPES)
def test_write_kv_scatters(pool_dtype: str) -> None:
    """Oracle: a loop over tokens; every other row of the pools keeps what it held."""
    randn = normal(4)
    k, v = randn(5, 2, 8), randn(5, 2, 4)
    k_pool = torch.full((6, 4, 2, 8), 7.0, dtype=getattr(torch, pool_dtype))
    v_pool = torch.full((6, 4, 2, 4), 7.0, dtype=getattr(torch, pool_dtype))
    expected_k, expected_v = k_pool.clone(), v_pool.clone()
    slots = [23, 0, 9, 8, 14]
    for t, slot in enumerate(slots):
        expected_k[slot // 4, slot % 4] = k[t].to(k_pool.dtype)
        expected_v[slot // 4, slot % 4] = v[t].to(v_pool.dtype)
    write_kv(k, v, k_pool, v_pool, torch.tensor(slots))
    assert torch.equal(k_pool, expected_k)
    assert torch.equal(v_pool, expected_v)


def test_write_kv_refuses_a_pool_that_it_would_copy() -> None:
    """Oracle: a pool whose pages overlap another layer's cannot be seen as rows; the write must not vanish."""
    pool = torch.zeros(3, 2, 4, 2, 8).select(1, 0)[:, :3]
    with pytest.raises(RuntimeError):
        write_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), pool, pool, torch.tensor([0]))
