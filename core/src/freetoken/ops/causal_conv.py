"""Depthwise causal convolution over a ragged batch, with the last inputs kept as state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(
    x: Tensor, weight: Tensor, state: Tensor, query_starts: Tensor, state_slots: Tensor, prefix_lens: Tensor
) -> Tensor:
    """``silu(Σ_j weight[:, j] · x[t − (W−1) + j])`` per channel, ``[T, C]`` in x's dtype.

    ``x [T, C]``, ``weight [C, W]``, ``state [slots, C, W−1] f32`` (oldest input first), ``query_starts [B+1] i32``,
    ``state_slots [B] i64``, ``prefix_lens [B] i32``. A sequence whose prefix is 0 starts from zeros whatever its slot
    holds; afterwards the slot holds its last ``W−1`` inputs. Every sequence brings at least one token.
    """
    kept = weight.shape[1] - 1
    history = state.index_select(0, state_slots).transpose(1, 2)  # [B, W-1, C], oldest first
    history = history.masked_fill((prefix_lens == 0).view(-1, 1, 1), 0.0)
    sequences, tokens = history.shape[0], x.shape[0]
    if tokens == sequences:
        window = torch.cat((history, x.float().unsqueeze(1)), dim=1)  # [T, W, C]
        out = (window * weight.float().t()).sum(1)
        last = window[:, 1:]
    else:
        padded, place = _with_history(x.float(), history, query_starts.long())
        taps = torch.arange(-kept, 1, device=x.device)
        window = padded[place.unsqueeze(1) + taps]  # [T, W, C]
        out = (window * weight.float().t()).sum(1)
        last = padded[place[query_starts[1:].long() - 1].unsqueeze(1) + taps[1:]]
    state.index_copy_(0, state_slots, last.transpose(1, 2).to(state.dtype))
    return F.silu(out).to(x.dtype)


def _with_history(x: Tensor, history: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence's rows behind its history rows, ``[T + B·(W−1), C]``, and where each row of ``x`` went."""
    sequences, kept, channels = history.shape
    rows = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(starts[1:], rows, right=True)
    place = rows + (sequence + 1) * kept
    padded = x.new_empty(x.shape[0] + sequences * kept, channels)
    padded[place] = x
    heads = starts[:-1] + torch.arange(sequences, device=x.device) * kept
    padded[heads.unsqueeze(1) + torch.arange(kept, device=x.device)] = history
    return padded, place
