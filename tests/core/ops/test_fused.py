"""The ops that smaller ones make up, against the formulas in float64."""

from __future__ import annotations

import pytest
import torch

from freetoken.ops.delta_net import delta_net
from freetoken.ops.gates import delta_gates, residual_add, sigmoid_gate
from freetoken.ops.rope_write import rope_write


def test_residual_add_is_the_formula_rounded_once() -> None:
    """Oracle: float64, rounded to bfloat16: the result is the nearest, or its neighbour at a tie of float32's error."""
    torch.manual_seed(0)
    x, residual, shared = (torch.randn(5, 64).bfloat16() for _ in range(3))
    gate = torch.randn(5, 1).bfloat16()
    exact = residual.double() + x.double() + shared.double() * torch.sigmoid(gate.double())
    got = residual_add(x, residual, shared, gate).double()
    assert bool(((got - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all())
    assert torch.equal(residual_add(x, residual, None, None), (x.double() + residual.double()).bfloat16())


def test_sigmoid_gate_is_the_formula() -> None:
    """Oracle: float64."""
    torch.manual_seed(1)
    x, gate = torch.randn(3, 4, 8), 4 * torch.randn(3, 4, 16)[..., 8:]
    torch.testing.assert_close(sigmoid_gate(x, gate).double(), x.double() / (1 + torch.exp(-gate.double())))


def test_delta_gates_are_the_formula_at_both_ends() -> None:
    """Oracle: float64, with strengths and decays so small and so large that naive formulas lose them."""
    ba = torch.tensor([[-30.0, 0.0, 30.0, -30.0, 0.5, 60.0]])
    rate, bias = -torch.tensor([0.1, 1.0, 16.0]), torch.tensor([0.0, 1.0, -2.0])
    beta, decay = delta_gates(ba, rate, bias)
    a = (ba[:, 3:] + bias).double()
    torch.testing.assert_close(beta.double(), 1 / (1 + torch.exp(-ba[:, :3].double())))
    torch.testing.assert_close(decay.double(), rate.double() * torch.log1p(torch.exp(a)), rtol=1e-5, atol=1e-12)
    assert bool((decay < 0).all())


@pytest.mark.parametrize("normed", [True, False])
def test_rope_write_norms_rotates_and_writes(normed: bool) -> None:
    """Oracle: complex multiplication in float64, and the rows that were asked for."""
    torch.manual_seed(2)
    tokens, heads, dim, rotary, eps = 4, 2, 8, 6, 1e-5
    q, k, v = torch.randn(tokens, 3, dim), torch.randn(tokens, heads, dim), torch.randn(tokens, heads, 5)
    weights = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    angles = torch.rand(9, rotary // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([0, 8, 3, 3]), torch.tensor([7, 0, 5, 2])
    pools = torch.zeros(2, 4, heads, dim), torch.zeros(2, 4, heads, 5)
    got = rope_write(q, k, v, *weights, eps, positions, table, *pools, slots)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.double()
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
        half = rotary // 2
        pair = torch.complex(x[..., :half], x[..., half:rotary])
        pair = pair * torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
        return torch.cat((pair.real, pair.imag, x[..., rotary:]), dim=-1)

    torch.testing.assert_close(got.double(), turned(q, weights[0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        pools[0].view(8, heads, dim)[slots].double(), turned(k, weights[1]), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(pools[1].view(8, heads, 5)[slots], v)
    untouched = [i for i in range(8) if i not in slots.tolist()]
    assert not pools[0].view(8, heads, dim)[untouched].any()


@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 1, 6)])
def test_delta_net_is_the_recurrence(lengths: tuple[int, ...]) -> None:
    """Oracle: the recurrence token by token in float64, sequence by sequence."""
    torch.manual_seed(3)
    k_heads, v_heads, k_dim, v_dim, eps = 2, 4, 8, 6, 1e-6
    tokens, width = sum(lengths), 2 * k_heads * k_dim + v_heads * v_dim
    mixed, ba = torch.randn(tokens, width), torch.randn(tokens, 2 * v_heads)
    rate, bias = -torch.rand(v_heads), torch.randn(v_heads)
    state, slots = torch.randn(5, v_heads, k_dim, v_dim), torch.tensor([4, 0, 2])
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    prefixes = torch.tensor([0, 3, 9]).int()
    before = state.double()
    got = delta_net(mixed, ba, rate, bias, eps, state, starts, slots, prefixes)
    beta, decay = (t.double() for t in delta_gates(ba, rate, bias))
    for sequence, slot in enumerate(slots.tolist()):
        memory = before[slot] * float(prefixes[sequence] > 0)
        for row in range(int(starts[sequence]), int(starts[sequence + 1])):
            x = mixed[row].double()
            both = x[: 2 * k_heads * k_dim].view(2, k_heads, k_dim)
            q, k = both / (both.square().sum(-1, keepdim=True) + eps).sqrt()
            for head in range(v_heads):
                key, query = k[head // 2], q[head // 2]
                value = x[2 * k_heads * k_dim :].view(v_heads, v_dim)[head]
                memory[head] = memory[head] * torch.exp(decay[row, head])
                memory[head] += beta[row, head] * torch.outer(key, value - key @ memory[head])
                want = query @ memory[head] * k_dim**-0.5
                torch.testing.assert_close(got[row, head].double(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state[slot].double(), memory, rtol=1e-4, atol=1e-4)
