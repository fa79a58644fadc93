"""Causal convolution and gated delta rule: ragged batches, fresh and continued sequences, untouched slots."""

from __future__ import annotations

import pytest
import torch

from freetoken.ops import causal_conv, gated_delta, gates, norms

LENGTHS = [[1], [1, 1, 1, 1, 1], [64], [3, 1, 40], [65, 2, 33]]


def _where(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    slots = torch.randperm(len(lengths) + 2)[: len(lengths)]
    prefix = torch.tensor([0 if i % 2 else 7 for i in range(len(lengths))], dtype=torch.int32)
    return starts, slots, prefix


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_causal_conv_matches_reference(kernel, close, dtype, lengths):
    channels, width, tokens = 136, 4, sum(lengths)
    starts, slots, prefix = _where(lengths)
    x = torch.randn(tokens, 2 * channels).to(getattr(torch, dtype))[:, channels:]
    weight = torch.randn(channels, width).to(x.dtype)
    state = torch.randn(len(lengths) + 2, channels, width - 1)
    want_state = state.clone()
    want = causal_conv.causal_conv(x.float(), weight.float(), want_state, starts, slots, prefix)
    got = kernel("causal_conv", dtype, rows=channels, width=width)(x, weight, state, starts, slots, prefix)
    close(got, want, scale=2)
    torch.testing.assert_close(state, want_state, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_gated_delta_matches_reference(kernel, close, dtype, lengths):
    k_heads, v_heads, k_dim, v_dim, tokens = 1, 2, 32, 24, sum(lengths)
    kind = getattr(torch, dtype)
    starts, slots, prefix = _where(lengths)
    q, k = (norms.l2norm(torch.randn(tokens, k_heads, k_dim), 1e-6).to(kind) for _ in range(2))
    v = torch.randn(tokens, 2 * v_heads * v_dim).to(kind)[:, : v_heads * v_dim].view(tokens, v_heads, v_dim)
    decay, beta = -torch.rand(tokens, v_heads), torch.rand(tokens, v_heads)
    state = torch.randn(len(lengths) + 2, v_heads, k_dim, v_dim)
    want_state = state.clone()
    sizes = {"q_heads": k_heads, "kv_heads": v_heads, "head_dim": k_dim, "v_dim": v_dim}
    want = gated_delta.gated_delta(q.float(), k.float(), v.float(), decay, beta, want_state, starts, slots, prefix)
    got = kernel("gated_delta", dtype, **sizes)(q, k, v, decay, beta, state, starts, slots, prefix)
    unit = 2e-5 if dtype == "float32" else 4e-3
    torch.testing.assert_close(got.float(), want, rtol=unit, atol=unit)
    torch.testing.assert_close(state, want_state, rtol=unit, atol=unit)


def test_gated_delta_stays_exact_where_all_keys_are_alike(kernel):
    """Property: equal keys, full strength and no decay make the powers of A grow; the inverse must not.

    Oracle: the recurrent form in float64, which overwrites one memory again and again.
    """
    tokens, k_dim, v_dim = 64, 16, 16
    k = torch.nn.functional.normalize(torch.randn(1, 1, k_dim), dim=-1).expand(tokens, 1, k_dim).contiguous()
    v, zero, one = torch.randn(tokens, 1, v_dim), torch.zeros(tokens, 1), torch.ones(tokens, 1)
    starts, slots, prefix = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([0]), torch.zeros(1).int()
    call = kernel("gated_delta", "float32", q_heads=1, kv_heads=1, head_dim=k_dim, v_dim=v_dim)
    got = call(k, k, v, zero, one, torch.zeros(1, 1, k_dim, v_dim), starts, slots, prefix)
    torch.testing.assert_close(got, v * k_dim**-0.5, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1, 1, 1], [3, 1, 40]], ids=str)
def test_delta_net_is_norm_and_gates_and_rule(kernel, dtype, lengths):
    """Oracle: the three references one after another in float32; norms are rounded as they would be stored."""
    k_heads, v_heads, k_dim, v_dim, tokens = 2, 4, 32, 24, sum(lengths)
    kind = getattr(torch, dtype)
    starts, slots, prefix = _where(lengths)
    width = 2 * k_heads * k_dim + v_heads * v_dim
    mixed, ba = torch.randn(tokens, 2 * width).to(kind)[:, :width], (3 * torch.randn(tokens, 2 * v_heads)).to(kind)
    rate, bias = -torch.rand(v_heads), torch.randn(v_heads)
    state = torch.randn(len(lengths) + 2, v_heads, k_dim, v_dim)
    want_state = state.clone()
    sizes = {"q_heads": k_heads, "kv_heads": v_heads, "head_dim": k_dim, "v_dim": v_dim}
    got = kernel("delta_net", dtype, **sizes)(mixed, ba, rate, bias, 1e-6, state, starts, slots, prefix)
    both, v = mixed.split((width - v_heads * v_dim, v_heads * v_dim), dim=1)
    both = norms.l2norm(both.reshape(tokens, 2 * k_heads, k_dim), 1e-6).float()
    beta, decay = gates.delta_gates(ba, rate, bias)
    want = gated_delta.gated_delta(
        both[:, :k_heads], both[:, k_heads:], v.reshape(tokens, v_heads, v_dim).float(), decay, beta, want_state,
        starts, slots, prefix,
    )  # fmt: skip
    unit = 2e-5 if dtype == "float32" else 4e-3
    torch.testing.assert_close(got.float(), want, rtol=unit, atol=unit)
    torch.testing.assert_close(state, want_state, rtol=unit, atol=unit)
