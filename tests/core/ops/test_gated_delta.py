"""The gated delta rule: chunked, recurrent and token by token are one thing; and transformers agrees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.ops.gated_delta import CHUNK_TOKENS, gated_delta
from freetoken.testing.fakes import normal

SLOTS = 6
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 16, 24


def sequential(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, one token and one head at a time, in float64. ``state [Hv, Dk, Dv]``."""
    out, state = torch.zeros(v.shape, dtype=torch.float64), state.double().clone()
    share = v.shape[1] // k.shape[1]
    for t in range(v.shape[0]):
        for h in range(v.shape[1]):
            q_t, k_t, v_t = q[t, h // share].double(), k[t, h // share].double(), v[t, h].double()
            state[h] = state[h] * decay[t, h].double().exp()
            state[h] += beta[t, h].double() * torch.outer(k_t, v_t - k_t @ state[h])
            out[t, h] = q_t @ state[h] / k.shape[-1] ** 0.5
    return out, state


def inputs(tokens: int, seed: int = 0, decay_scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    randn = normal(seed)
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (randn(tokens, K_HEADS, K_DIM), randn(tokens, K_HEADS, K_DIM)))
    decay = -decay_scale * torch.nn.functional.softplus(randn(tokens, V_HEADS))
    return q, k, randn(tokens, V_HEADS, V_DIM), decay, torch.sigmoid(randn(tokens, V_HEADS))


def where(lens: list[int], prefixes: list[int], slots: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    return starts, torch.tensor(slots), torch.tensor(prefixes, dtype=torch.int32)


@pytest.mark.parametrize("decay_scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(
    ("lens", "prefixes"),
    [
        ([1], [0]),
        ([1, 1, 1], [4, 0, 9]),
        ([5], [0]),
        ([CHUNK_TOKENS, CHUNK_TOKENS + 1], [3, 0]),
        ([1, 150, 2], [7, 1, 0]),
    ],
)
def test_equals_the_definition(lens: list[int], prefixes: list[int], decay_scale: float) -> None:
    """Oracle: the sequential form, to 1e-5; states too; a new sequence ignores what its slot holds; others keep theirs.

    Decays from nearly 1 to nearly 0: no exponent of the chunked form may overflow.
    """
    args = inputs(sum(lens), seed=len(lens), decay_scale=decay_scale)
    state = normal(9)(SLOTS, V_HEADS, K_DIM, V_DIM)
    before, slots = state.clone(), [4, 0, 3][: len(lens)]
    out = gated_delta(*args, state, *where(lens, prefixes, slots))
    row = 0
    for length, prefix, slot in zip(lens, prefixes, slots, strict=True):
        start = before[slot] if prefix else torch.zeros_like(before[slot])
        piece = slice(row, row + length)
        want, last = sequential(*(a[piece] for a in args), start)
        torch.testing.assert_close(out[piece].double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[slot].double(), last, rtol=1e-5, atol=1e-5)
        row += length
    others = [s for s in range(SLOTS) if s not in slots]
    assert torch.equal(state[others], before[others])


def test_chunks_then_tokens_equal_one_prefill() -> None:
    """Oracle: the whole in one call, against 70 tokens, then 3, then one by one, to 1e-5."""
    args = inputs(80)
    once, cut = torch.zeros(SLOTS, V_HEADS, K_DIM, V_DIM), torch.zeros(SLOTS, V_HEADS, K_DIM, V_DIM)
    want = gated_delta(*args, once, *where([80], [0], [1]))
    outs, done = [], 0
    for length in (70, 3, *(1,) * 7):
        piece = [a[done : done + length] for a in args]
        outs.append(gated_delta(*piece, cut, *where([length], [done], [1])))
        done += length
    torch.testing.assert_close(torch.cat(outs), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cut, once, rtol=1e-5, atol=1e-5)


def test_equals_transformers() -> None:
    """Oracle: transformers' torch_chunk_gated_delta_rule, final state included."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, decay, beta = inputs(100, seed=3)
    state = torch.zeros(SLOTS, V_HEADS, K_DIM, V_DIM)
    out = gated_delta(q, k, v, decay, beta, state, *where([100], [0], [2]))
    wide_q, wide_k = (t.repeat_interleave(V_HEADS // K_HEADS, dim=1).unsqueeze(0) for t in (q, k))
    want, last = torch_chunk_gated_delta_rule(
        wide_q, wide_k, v.unsqueeze(0), g=decay.unsqueeze(0), beta=beta.unsqueeze(0), output_final_state=True
    )
    torch.testing.assert_close(out, want.squeeze(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[2], last.squeeze(0), rtol=1e-4, atol=1e-5)


def test_rounded_inputs_keep_a_float32_state() -> None:
    """Oracle: the float32 call on the same rounded inputs."""
    q, k, v, decay, beta = inputs(20, seed=4)
    rounded = [t.bfloat16() for t in (q, k, v)]
    states = [torch.zeros(SLOTS, V_HEADS, K_DIM, V_DIM) for _ in range(2)]
    out = gated_delta(*rounded, decay, beta, states[0], *where([20], [0], [0]))
    want = gated_delta(*(t.float() for t in rounded), decay, beta, states[1], *where([20], [0], [0]))
    assert torch.equal(out, want.bfloat16())
    assert torch.equal(states[0], states[1])
