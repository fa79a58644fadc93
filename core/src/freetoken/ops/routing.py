"""The choice of experts for each token."""

from __future__ import annotations

import torch
from torch import Tensor


def router_topk(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """``logits [T, E]`` → ``(weights [T, K] f32, experts [T, K] i32)``, likeliest first.

    Softmax in float32 over all experts, then the ``K`` largest; equal logits go to the lower expert (a stable sort).
    ``renormalise`` divides the chosen weights by their sum.
    """
    wide = logits.float()
    chosen, experts = torch.sort(wide, dim=-1, descending=True, stable=True)
    weights = torch.exp(chosen[:, :top_k] - torch.logsumexp(wide, dim=-1, keepdim=True))
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts[:, :top_k].to(torch.int32)
