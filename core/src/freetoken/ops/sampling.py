"""One token a row: cuts by threshold, then one draw by the inverse of the distribution function.

What every implementation must reproduce, for a row with logits ``l``, temperature ``t`` and ``s = (l − max l) / t``:

- ``t = 0``: the token of the largest logit, the lowest id where several are equal. Nothing else is looked at.
- top-k (0 or ≥ V: off) keeps ``s ≥`` the k-th largest, so tokens equal to the k-th stay.
- top-p (1: off), over what top-k kept and renormalised, keeps a token when the mass of strictly likelier tokens is
  below ``top_p`` (Holtzman et al. 2020, arXiv:1904.09751). At least the likeliest token stays.
- min-p (0: off) keeps ``s ≥ log(min_p)``, that is ``p ≥ min_p · p_max`` (Nguyen et al. 2024, arXiv:2407.01082).
- The draw: with ``u = philox.uniform(seed, step)`` the token is the lowest id whose running sum of kept ``exp(s)``, in
  order of ids, exceeds ``u`` times the whole sum.

All three cuts are thresholds on ``s``: ties never depend on the order of a sort, and no kernel needs one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.ops.philox import uniform

FIRST_SLICE_TOKENS = 256  # of a CPU's top-p without top-k: usually holds the mass, and spares sorting the vocabulary
WIDEN_TIMES = 8


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, steps: Tensor
) -> Tensor:
    """``logits [R, V] f32``; ``temperature``, ``top_p``, ``min_p [R] f32``; ``top_k [R] i32``; ``seeds``, ``steps
    [R] i64`` → ``[R] i64``. On a CUDA device nothing synchronises with the host."""
    greedy = temperature == 0
    best = logits.argmax(-1)
    if logits.device.type == "cpu" and bool(greedy.all()):
        return best
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.masked_fill(greedy, 1.0).unsqueeze(-1)
    cut = threshold(scaled, top_k, top_p, min_p)
    return torch.where(greedy, best, draw(scaled, cut, uniform(seeds, steps)))


def threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest value of ``scaled [R, V]`` (each row's largest is 0) that survives the cuts, ``[R, 1] f32``."""
    floor = min_p.log().unsqueeze(-1)
    vocab = scaled.shape[-1]
    if scaled.device.type != "cpu":
        return torch.maximum(floor, _sorted_cut(scaled, vocab, top_k, top_p)[0])
    by_k = (top_k > 0) & (top_k < vocab)
    by_p = top_p < 1
    if not bool((by_k | by_p).any()):
        return floor
    width = int(top_k.masked_fill(~by_k, 1).max())
    if bool((by_p & ~by_k).any()):
        width = max(width, FIRST_SLICE_TOKENS)
    return torch.maximum(floor, _sliced_cut(scaled, min(width, vocab), top_k, top_p))


def _sliced_cut(scaled: Tensor, width: int, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The threshold of top-k and top-p, ``[R, 1]``; rows for which a slice is too narrow try a wider one."""
    cut, enough = _sorted_cut(scaled, width, top_k, top_p)
    if width < scaled.shape[-1] and not bool(enough.all()):
        rest = (~enough).nonzero().squeeze(-1)
        wider = min(WIDEN_TIMES * width, scaled.shape[-1])
        cut[rest] = _sliced_cut(scaled[rest], wider, top_k[rest], top_p[rest])
    return cut


def _sorted_cut(scaled: Tensor, width: int, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The threshold of top-k and top-p from the ``width`` largest values, and whether that was wide enough ``[R]``."""
    vocab = scaled.shape[-1]
    if width < vocab:
        ordered = torch.topk(scaled, width, dim=-1).values
    else:
        ordered = torch.sort(scaled, dim=-1, descending=True).values
    by_k = ((top_k > 0) & (top_k < vocab)).unsqueeze(-1)
    by_p = (top_p < 1).unsqueeze(-1)
    kth = ordered.gather(-1, (top_k.long().unsqueeze(-1) - 1).clamp(0, width - 1))
    kth = kth.masked_fill(~by_k, float("-inf"))
    mass = _kept(scaled, kth).sum(-1, keepdim=True, dtype=torch.float64)
    running = _kept(ordered, kth).cumsum(-1, dtype=torch.float64)
    reached = (running < top_p.unsqueeze(-1) * mass).sum(-1, keepdim=True)  # place of the first to reach top_p
    pth = ordered.gather(-1, reached.clamp(max=width - 1)).masked_fill(~by_p, float("-inf"))
    return torch.maximum(kth, pth), (~by_p | (reached < width)).squeeze(-1)


def draw(scaled: Tensor, cut: Tensor, u: Tensor) -> Tensor:
    """``scaled [R, V]``, ``cut [R, 1]``, ``u [R] f32`` in [0, 1) → the token each row drew, ``[R] i64``."""
    running = _kept(scaled, cut).cumsum(-1, dtype=torch.float64)
    target = u.double().unsqueeze(-1) * running[:, -1:]
    return torch.searchsorted(running, target, right=True).squeeze(-1)


def _kept(scaled: Tensor, cut: Tensor) -> Tensor:
    """``exp(scaled)`` where it survives ``cut``, else 0."""
    if cut.device.type == "cpu" and bool((cut == float("-inf")).all()):
        return scaled.exp()
    return scaled.exp().masked_fill_(scaled < cut, 0.0)
