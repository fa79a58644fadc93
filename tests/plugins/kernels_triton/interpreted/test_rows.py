"""Norms, rotary embedding, activation, cache write and router: strided rows, odd counts."""

from __future__ import annotations

import pytest
import torch

from freetoken.ops import activation, kv_write, norms, rope, routing

DTYPES = ["float32", "float16"]


def _random(dtype: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [64, 136, 2048])
def test_rms_norm_matches_reference(kernel, close, dtype, cols):
    x, weight = _random(dtype, 5, cols), _random(dtype, cols)
    close(kernel("rms_norm", dtype, cols=cols)(x, weight, 1e-6), norms.rms_norm(x.float(), weight.float(), 1e-6))


def test_rms_norm_of_strided_heads_matches_reference(kernel, close):
    packed, weight = _random("float16", 7, 5 * 32), _random("float16", 32)
    heads = packed[:, 32:128].view(7, 3, 32)
    got = kernel("rms_norm", "float16", cols=32)(heads, weight, 1e-6)
    assert got.is_contiguous()
    close(got, norms.rms_norm(heads.float(), weight.float(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_matches_reference(kernel, close, dtype):
    x, weight = _random(dtype, 3, 136), _random(dtype, 136)
    residual = _random(dtype, 3, 272)[:, 136:]
    normed, summed = kernel("add_rms_norm", dtype, cols=136)(x, residual, weight, 1e-5)
    want_normed, want_summed = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, want_summed)
    close(normed, want_normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm_matches_reference(kernel, close, dtype):
    x, weight = _random(dtype, 5, 3, 32), _random(dtype, 32)
    gate = _random(dtype, 5, 256)[:, 64:160].view(5, 3, 32)
    got = kernel("gated_rms_norm", dtype, cols=32, kv_heads=3, v_dim=32)(x, gate, weight, 1e-6)
    close(got, norms.gated_rms_norm(x.float(), gate.float(), weight.float(), 1e-6), scale=2)


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_l2norm_matches_reference(kernel, close, tokens):
    x = _random("float16", tokens, 192)[:, 64:].view(tokens, 2, 64)
    got = kernel("l2norm", "float16", cols=64, q_heads=2, head_dim=64)(x, 1e-6)
    close(got, norms.l2norm(x.float(), 1e-6))


def test_l2norm_does_not_depend_on_the_token_count(kernel):
    """Property: each row is bitwise what the same compiled kernel makes of it alone."""
    x = _random("float16", 9, 2, 64)
    call = kernel("l2norm", "float16", cols=64, q_heads=2, head_dim=64)
    assert torch.equal(call(x, 1e-6), torch.cat([call(x[i : i + 1], 1e-6) for i in range(9)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (64, 16), (96, 48)])
def test_rope_matches_reference(kernel, close, dtype, dim, rotary):
    tokens, q_heads, k_heads = 3, 5, 2
    packed = _random(dtype, tokens, (q_heads + k_heads) * dim)
    q = packed[:, : q_heads * dim].view(tokens, q_heads, dim)
    k = packed[:, q_heads * dim :].view(tokens, k_heads, dim)
    positions = torch.tensor([11, 0, 4])
    angles = torch.rand(12, rotary // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    call = kernel("rope", dtype, q_heads=q_heads, kv_heads=k_heads, head_dim=dim, rotary_dim=rotary)
    got_q, got_k = call(q, k, positions, table)
    want_q, want_k = rope.rope(q.float(), k.float(), positions, table)
    close(got_q, want_q)
    close(got_k, want_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [40, 1100 // 4 * 4 + 4])
def test_silu_and_mul_matches_reference(kernel, close, dtype, cols):
    x = _random(dtype, 3, 2 * cols)
    got = kernel("silu_and_mul", dtype, intermediate=cols)(x)
    close(got, activation.silu_and_mul(x.float()), scale=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_matches_reference_and_skips_negative_slots(kernel, dtype):
    packed = _random(dtype, 4, 2 * 3 * 32)
    k, v = packed[:, :96].view(4, 3, 32), packed[:, 96:].view(4, 3, 32)
    k_pool, v_pool = _random(dtype, 3, 4, 3, 32), _random(dtype, 3, 4, 3, 32)
    want_k, want_v = k_pool.clone(), v_pool.clone()
    slots = torch.tensor([5, 11, -1, 0])
    kernel("write_kv", dtype, kv_heads=3, head_dim=32, v_dim=32)(k, v, k_pool, v_pool, slots)
    kept = slots >= 0
    kv_write.write_kv(k[kept], v[kept], want_k, want_v, slots[kept])
    assert torch.equal(k_pool, want_k)
    assert torch.equal(v_pool, want_v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(20, 3), (128, 8)])
def test_router_topk_matches_reference_also_on_ties(kernel, dtype, renormalise, experts, top_k):
    logits = (torch.randn(7, experts) * 2).round().to(getattr(torch, dtype))  # rounded: many ties
    got_weights, got_experts = kernel("router_topk", dtype, experts=experts, top_k=top_k)(logits, top_k, renormalise)
    weights, chosen = routing.router_topk(logits.float(), top_k, renormalise)
    assert torch.equal(got_experts, chosen)
    torch.testing.assert_close(got_weights, weights, rtol=1e-5, atol=1e-6)


def test_router_topk_of_nans_stays_inside_the_bank(kernel):
    """Property: rehearsals run on garbage, and an expert id must be one of the bank whatever the logits are."""
    _, chosen = kernel("router_topk", "float32", experts=20, top_k=3)(torch.full((2, 20), float("nan")), 3, True)
    assert ((chosen >= 0) & (chosen < 20)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "v_dim", "rotary"), [(18, 3, 64, 32, 64), (4, 2, 128, 128, 32), (5, 5, 80, 80, 80)]
)
def test_rope_write_is_norm_and_rope_and_write(kernel, dtype, normed, q_heads, kv_heads, dim, v_dim, rotary):
    """Oracle: the three kernels one after another, bit for bit. One slot is below 0 and writes nothing."""
    tokens, kind = 5, getattr(torch, dtype)
    packed = torch.randn(tokens, (q_heads + kv_heads) * dim + kv_heads * v_dim).to(kind)
    q, k, v = packed.split((q_heads * dim, kv_heads * dim, kv_heads * v_dim), dim=1)
    q, k, v = q.view(tokens, q_heads, dim), k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, v_dim)
    weights = tuple(torch.randn(dim).to(kind) for _ in range(2)) if normed else (None, None)
    positions, cos_sin = torch.tensor([7, 0, 3, 99, 41]), torch.randn(100, rotary)
    slots = torch.tensor([17, 3, -1, 40, 0])
    pools = [torch.randn(3, 16, kv_heads, size).to(kind) for size in (dim, v_dim)]
    want_pools = [pool.clone() for pool in pools]
    sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "v_dim": v_dim, "rotary_dim": rotary}
    fused = kernel("rope_write", dtype, cols=dim if normed else 0, **sizes)
    got = fused(q, k, v, *weights, 1e-5, positions, cos_sin, *pools, slots)
    if normed:
        norm = kernel("rms_norm", dtype, cols=dim)
        q, k = norm(q, weights[0], 1e-5), norm(k, weights[1], 1e-5)
    want, k = kernel("rope", dtype, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, rotary_dim=rotary)(
        q, k, positions, cos_sin
    )
    kernel("write_kv", dtype, kv_heads=kv_heads, head_dim=dim, v_dim=v_dim)(k, v, *want_pools, slots)
    exact = {"rtol": 0, "atol": 0} if dtype == "float16" else {"rtol": 2e-6, "atol": 2e-6}  # sums of halves
    torch.testing.assert_close(got, want, **exact)
    for pool, want_pool in zip(pools, want_pools, strict=True):
        torch.testing.assert_close(pool, want_pool, **exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_router_ties_go_to_the_lower_expert_and_nothing_leaves_the_bank(kernel, dtype):
    """Oracle: a stable sort. Logits of few values, of both signs and both zeros; then infinities and not-a-numbers."""
    kind, experts, top_k = getattr(torch, dtype), 48, 6
    logits = torch.randint(-2, 3, (9, experts)).to(kind) * 0.5
    logits[logits == 0] *= torch.where(torch.rand(int((logits == 0).sum())) < 0.5, -1.0, 1.0).to(kind)
    logits[5] = -3e4 * torch.rand(experts).to(kind)
    call = kernel("router_topk", dtype, experts=experts, top_k=top_k)
    weights, chosen = call(logits, top_k, True)
    want_weights, want = routing.router_topk(logits, top_k, True)
    assert torch.equal(chosen, want)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)
    strange = torch.full((3, experts), float("nan")).to(kind)
    strange[1] = float("-inf")
    strange[2, ::2] = -torch.tensor(float("nan")).to(kind)
    _, chosen = call(strange, top_k, False)
    for row in chosen.tolist():
        assert len(set(row)) == top_k
        assert all(0 <= expert < experts for expert in row)
