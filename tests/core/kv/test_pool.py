"""The tensor pools. Oracles: the specs' own arithmetic, torch's addresses, and plain row assignment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freetoken.kv.pool import CachePools, pool_bytes
from freetoken.kv.sequence import StateCopy
from freetoken.vocab.cache_spec import PagedKV, RecurrentState

KV = PagedKV(heads=2, k_dim=8, v_dim=4, dtype="bfloat16")
WINDOWED = PagedKV(heads=1, k_dim=8, v_dim=8, dtype="float32", window=4)
STATE = RecurrentState(shapes=((6, 3), (2, 4, 4)))
ODD = RecurrentState(shapes=((3, 1),), dtype="bfloat16")  # a row of 6 bytes
HYBRID = (STATE, STATE, KV, WINDOWED, STATE, KV, ODD, ODD)


@pytest.fixture
def pools() -> CachePools:
    return CachePools(HYBRID, num_pages=5, page_tokens=4, state_rows=3, device="cpu")


def test_every_layer_has_the_shapes_and_dtypes_its_spec_names(pools):
    assert [tuple(t.shape) for t in pools.layer(2)] == [(5, 4, 2, 8), (5, 4, 2, 4)]
    assert [tuple(t.shape) for t in pools.layer(3)] == [(5, 4, 1, 8)] * 2
    assert [tuple(t.shape) for t in pools.layer(0)] == [(3, 6, 3), (3, 2, 4, 4)]
    assert [t.dtype for i in (2, 3, 0, 6) for t in pools.layer(i)[:1]] == [
        torch.bfloat16, torch.float32, torch.float32, torch.bfloat16,
    ]  # fmt: skip
    assert len(pools.layers) == len(HYBRID)


def test_tensors_are_zero_contiguous_aligned_and_apart(pools):
    """Oracle: each tensor is filled with its own number; afterwards all still hold theirs."""
    tensors = [t for layer in pools.layers for t in layer]
    for number, tensor in enumerate(tensors, 1):
        assert not tensor.any(), "fresh pools are zeros"
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors, 1):
        assert (tensor == number).all()


def test_bytes_are_what_the_specs_declare(pools):
    exact = 5 * 4 * (2 * KV.token_bytes + WINDOWED.token_bytes) + 3 * (3 * STATE.slot_bytes + 2 * ODD.slot_bytes)
    padding = 3 * 72 + 2 * 5 * 6  # rows of 72 bytes come in twos (one more a layer), rows of 6 bytes in eights
    assert pools.bytes == pool_bytes(HYBRID, 5, 4, 3) == exact + padding


def test_copy_state_copies_one_row_in_all_layers_in_order(pools):
    """Oracle: the same assignments on clones, layer by layer."""
    states = [t for i, s in enumerate(HYBRID) if isinstance(s, RecurrentState) for t in pools.layer(i)]
    for tensor in states:
        tensor.copy_(torch.randn(tensor.shape))
    expected = [t.clone() for t in states]
    for tensor in expected:
        tensor[2] = tensor[1]
        tensor[1] = tensor[0]
    pools.copy_state([StateCopy(1, 2), StateCopy(0, 1)])
    assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))
    pools.zero_state([2])
    assert not any(t[2].any() for t in states)
    assert all(torch.equal(a[:2], b[:2]) for a, b in zip(states, expected, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "int8"])
def test_other_dtypes_of_the_vocabulary_make_pools(dtype):
    pools = CachePools([PagedKV(1, 16, 16, dtype)], num_pages=2, page_tokens=2, state_rows=0, device="cpu")
    assert pools.layer(0)[0].dtype == getattr(torch, dtype)
    assert not pools.layer(0)[0].to(torch.float32).any()


def test_recurrent_layers_without_rows_are_refused():
    with pytest.raises(ValueError, match="state_rows=1"):
        CachePools([STATE], num_pages=2, page_tokens=4, state_rows=1, device="cpu")


@pytest.mark.gpu
def test_a_pool_past_2_31_elements_is_addressed_right():
    """Oracle: a value written through the last page is read back there and nowhere near the wrapped address."""
    spec = PagedKV(heads=8, k_dim=128, v_dim=128, dtype="bfloat16")
    pages = 2**31 // (16 * 8 * 128) + 8
    pools = CachePools([spec], num_pages=pages, page_tokens=16, state_rows=0, device="cuda")
    k, v = pools.layer(0)
    k[-1] = 3.0
    assert float(k[-1].min()) == 3.0
    assert not k[:64].any()
    assert not v[-1].any()


def test_a_forks_writes_are_its_own():
    """Oracle: the kernel's own map of the process: the pages are private."""
    spec = PagedKV(heads=2, k_dim=64, v_dim=64, dtype="float32")
    pools = CachePools([spec], num_pages=300, page_tokens=16, state_rows=0, device="cpu")
    address = pools.layer(0)[0].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= address < high:
            assert line.split()[1] == "rw-p"
            return
    raise AssertionError("the pool is not in the map")
