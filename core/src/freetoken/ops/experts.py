"""The experts' weighted sum over a bank ``{"gate_up": [S, 2I, H], "down": [S, H, I]}`` in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from freetoken.ops.activation import silu_and_mul

GATHER_LIMIT_BYTES = 512 << 20  # up to here a CUDA device copies the chosen experts rather than wait for the host


def experts(hidden: Tensor, weights: Tensor, slots: Tensor, bank: Mapping[str, Tensor]) -> Tensor:
    """``Σ_k weights[t, k] · down(silu(gate(h)) · up(h))`` over the slots ``slots[t, k]`` of the bank.

    ``hidden [T, H]``, ``weights [T, K] f32``, ``slots [T, K] i32`` → ``[T, H]`` in hidden's dtype, summed in float32.
    A few rows on a CUDA device take a path without host synchronisation; otherwise the rows are sorted by slot and each
    slot that occurs makes one product.
    """
    gate_up, down = bank["gate_up"], bank["down"]
    slot_bytes = (gate_up[0].numel() + down[0].numel()) * gate_up.element_size()
    if hidden.device.type != "cpu" and slots.numel() * slot_bytes <= GATHER_LIMIT_BYTES:
        return experts_gathered(hidden, weights, slots, gate_up, down)
    return experts_grouped(hidden, weights, slots, gate_up, down)


def experts_gathered(hidden: Tensor, weights: Tensor, slots: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every (token, choice) pair with a copy of its expert: two batched products, no host synchronisation."""
    tokens, top_k = slots.shape
    flat = slots.reshape(-1).long()
    rows = hidden.repeat_interleave(top_k, dim=0).unsqueeze(-1)  # [T·K, H, 1]
    inner = silu_and_mul(torch.bmm(gate_up[flat], rows).squeeze(-1))
    out = torch.bmm(down[flat], inner.unsqueeze(-1)).view(tokens, top_k, -1)
    return (out.float() * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def experts_grouped(hidden: Tensor, weights: Tensor, slots: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Pairs sorted by slot; one pair of products for each slot that occurs, on a view of the bank."""
    top_k = slots.shape[1]
    ordered, order = torch.sort(slots.reshape(-1), stable=True)
    occurring, counts = torch.unique_consecutive(ordered, return_counts=True)
    tokens = order // top_k
    rows = hidden.index_select(0, tokens)
    parts = [
        F.linear(silu_and_mul(F.linear(part, gate_up[slot])), down[slot])
        for slot, part in zip(occurring.tolist(), torch.split(rows, counts.tolist()), strict=True)
    ]
    weighted = torch.cat(parts).float() * weights.reshape(-1).index_select(0, order).unsqueeze(-1)
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return out.index_add_(0, tokens, weighted).to(hidden.dtype)
