"""The experts op: both of its paths against a loop over (token, choice) pairs, and against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from freetoken.ops.experts import experts, experts_gathered, experts_grouped
from freetoken.testing.fakes import normal
from freetoken.testing.tolerances import assert_close

Call = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def pairwise(hidden: Tensor, weights: Tensor, slots: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    inner = down.shape[-1]
    for t in range(hidden.shape[0]):
        for weight, slot in zip(weights[t], slots[t].tolist(), strict=True):
            both = gate_up[slot].double() @ hidden[t].double()
            act = both[:inner] / (1 + torch.exp(-both[:inner])) * both[inner:]
            out[t] += weight.double() * (down[slot].double() @ act)
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 4, 50])
@pytest.mark.parametrize("call", [experts_gathered, experts_grouped])
def test_equals_a_loop_over_pairs(call: Call, tokens: int, dtype: str) -> None:
    """Oracle: one (token, choice) pair at a time in float64. Slots repeat within a row and most never occur."""
    randn = normal(tokens, dtype=getattr(torch, dtype))
    gate_up, down = randn(12, 32, 24) / 5, randn(12, 24, 16) / 4
    slots = torch.randint(3, 9, (tokens, 3), generator=torch.Generator().manual_seed(1)).int()
    hidden, weights = randn(tokens, 24), normal(9)(tokens, 3).abs()
    out = call(hidden, weights, slots, gate_up, down)
    assert out.dtype == hidden.dtype
    assert_close(out, pairwise(hidden, weights, slots, gate_up, down), dtype, 40)


def test_equals_transformers() -> None:
    """Oracle: transformers' Qwen3MoeExperts with the same fused weights."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    randn = normal(5)
    bank = {"gate_up": randn(6, 32, 32) / 6, "down": randn(6, 32, 16) / 4}
    module.gate_up_proj.data.copy_(bank["gate_up"])
    module.down_proj.data.copy_(bank["down"])
    hidden, weights = randn(7, 32), torch.rand(7, 2)
    slots = torch.stack([torch.randperm(6)[:2] for _ in range(7)])
    expected = module(hidden, slots, weights).detach()
    assert_close(experts(hidden, weights, slots.int(), bank), expected, "float32", 48)
