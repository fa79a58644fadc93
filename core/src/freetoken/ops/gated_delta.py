"""The gated delta rule: one recurrent form for decode, one chunked form for prefill.

Yang et al. 2024, arXiv:2412.06464; the chunked form uses the WY representation and the UT transform of
Yang et al. 2024, arXiv:2406.06484.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

CHUNK_TOKENS = 64


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    prefix_lens: Tensor,
) -> Tensor:
    """``S ← exp(decay)·S; S ← S + beta·k(v − kᵀS)ᵀ; out = qᵀS / √Dk``, token by token and head by head.

    ``q [T, Hk, Dk]`` and ``k [T, Hk, Dk]`` are l2-normed already; key head ``h`` serves the ``Hv/Hk`` value heads from
    ``h·Hv/Hk`` on. ``v [T, Hv, Dv]``, ``decay [T, Hv] f32`` (a logarithm, ≤ 0), ``beta [T, Hv] f32``,
    ``state [slots, Hv, Dk, Dv] f32``, updated in place; ``query_starts [B+1] i32``, ``state_slots [B] i64``,
    ``prefix_lens [B] i32``. A sequence whose prefix is 0 starts from a zero state. → ``[T, Hv, Dv]`` in v's dtype.

    One token a sequence takes the recurrent form and does not synchronise with the host; the chunked form does, to
    learn where the sequences lie.
    """
    share = v.shape[1] // k.shape[1]
    wide_q = q.float().repeat_interleave(share, dim=1) * k.shape[-1] ** -0.5
    wide_k = k.float().repeat_interleave(share, dim=1)
    wide_v, decay, beta = v.float(), decay.float(), beta.float()
    start = state.index_select(0, state_slots).float()
    start = start.masked_fill((prefix_lens == 0).view(-1, 1, 1, 1), 0.0)
    if v.shape[0] == start.shape[0]:
        out, final = recurrent_step(wide_q, wide_k, wide_v, decay, beta, start)
    else:
        pieces, finals = [], []
        bounds = query_starts.tolist()
        for index, (low, high) in enumerate(pairwise(bounds)):
            rows = slice(low, high)
            piece, last = chunked(wide_q[rows], wide_k[rows], wide_v[rows], decay[rows], beta[rows], start[index])
            pieces.append(piece)
            finals.append(last)
        out, final = torch.cat(pieces), torch.stack(finals)
    state.index_copy_(0, state_slots, final.to(state.dtype))
    return out.to(v.dtype)


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token for each of ``B`` sequences: ``q, k [B, Hv, Dk]``, ``v [B, Hv, Dv]``, ``state [B, Hv, Dk, Dv]``.

    Returns ``(out [B, Hv, Dv], new state)``. ``q`` is scaled already; all float32.
    """
    state = state * decay.exp()[..., None, None]
    seen = torch.matmul(k.unsqueeze(-2), state)  # [B, Hv, 1, Dv]
    delta = (v.unsqueeze(-2) - seen) * beta[..., None, None]
    state = state + k.unsqueeze(-1) * delta
    return torch.matmul(q.unsqueeze(-2), state).squeeze(-2), state


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence of ``L`` tokens: ``q, k [L, Hv, Dk]``, ``v [L, Hv, Dv]``, ``state [Hv, Dk, Dv]``.

    Within a chunk, with ``g`` the running sum of the decays and ``D_ij = exp(g_i − g_j)`` for ``j ≤ i``, the corrected
    values solve ``(I + A) U = beta·v`` and ``(I + A) W = beta·exp(g)·k`` with ``A = strict lower of (beta·k kᵀ ∘ D)``.
    Only the state then passes from chunk to chunk. Returns ``(out [L, Hv, Dv], new state)``; all float32.
    """
    length, heads, _ = q.shape
    size = min(CHUNK_TOKENS, length)
    count = -(-length // size)
    # Rows of zeros behind the end change nothing: beta 0 writes nothing, decay 0 forgets nothing.
    q, k, v, decay, beta = (_in_chunks(t, count, size) for t in (q, k, v, decay, beta))
    g = decay.cumsum(-1)  # [n, Hv, C]
    below = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    ratio = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~below, float("-inf")).exp()  # D
    lower = ((k * beta.unsqueeze(-1)) @ k.transpose(-1, -2) * ratio).tril(-1)
    right = torch.cat((v * beta.unsqueeze(-1), k * (beta * g.exp()).unsqueeze(-1)), dim=-1)
    # unitriangular: the diagonal of I + A is not read, so A alone serves.
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = q @ k.transpose(-1, -2) * ratio
    q_in = q * g.exp().unsqueeze(-1)
    k_out = (k * (g[..., -1:] - g).exp().unsqueeze(-1)).transpose(-1, -2)
    passed = g[..., -1].exp()[..., None, None]
    outs = []
    for n in range(count):
        corrected = u[n] - w[n] @ state
        outs.append(q_in[n] @ state + scores[n] @ corrected)
        state = state * passed[n] + k_out[n] @ corrected
    out = torch.stack(outs).transpose(1, 2).reshape(count * size, heads, -1)
    return out[:length], state


def _in_chunks(x: Tensor, count: int, size: int) -> Tensor:
    """``[L, Hv, …]`` → ``[n, Hv, C, …]``, zeros behind the end."""
    padded = x.new_zeros(count * size, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded.view(count, size, *x.shape[1:]).transpose(1, 2).contiguous()
