"""The rotary embedding against transformers and against a rotation written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.ops.rope import rope
from freetoken.testing.fakes import normal
from freetoken.testing.tolerances import assert_close


def table(rotary: int, rows: int = 200, base: float = 10000.0) -> Tensor:
    angles = torch.arange(rows).unsqueeze(1) * base ** (-torch.arange(0, rotary, 2) / rotary)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (64, 16), (80, 80), (128, 32)])
def test_equals_pairwise_rotation(dim: int, rotary: int) -> None:
    """Oracle: each pair (i, i + R/2) turned by its angle, one token at a time, in float64."""
    randn = normal(1)
    q, k, positions = randn(5, 3, dim), randn(5, 1, dim), torch.tensor([0, 7, 199, 3, 7])
    cos_sin = table(rotary)
    for got, x in zip(rope(q, k, positions, cos_sin), (q, k), strict=True):
        want = x.double().clone()
        for t, p in enumerate(positions.tolist()):
            for i in range(rotary // 2):
                c, s = cos_sin[p, i].double(), cos_sin[p, rotary // 2 + i].double()
                a, b = x[t, :, i].double(), x[t, :, i + rotary // 2].double()
                want[t, :, i], want[t, :, i + rotary // 2] = a * c - b * s, b * c + a * s
        assert_close(got, want, "float32")


def test_equals_transformers() -> None:
    """Oracle: transformers' apply_rotary_pos_emb over its own table's layout."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    randn = normal(2)
    q, k, positions, cos_sin = randn(6, 4, 32), randn(6, 2, 32), torch.arange(10, 16), table(32)
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    wide = (torch.cat((cos, cos), -1).unsqueeze(0), torch.cat((sin, sin), -1).unsqueeze(0))
    expected = apply_rotary_pos_emb(q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), *wide)
    for got, want in zip(rope(q, k, positions, cos_sin), expected, strict=True):
        assert_close(got, want.squeeze(0).transpose(0, 1), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounds_once(dtype: str) -> None:
    """Oracle: the float32 result of the same inputs, rounded: the last bit included."""
    randn = normal(3, dtype=getattr(torch, dtype))
    q, k, positions = randn(4, 2, 64), randn(4, 2, 64), torch.tensor([5, 1, 0, 90])
    wide = rope(q.float(), k.float(), positions, table(64))
    for got, want in zip(rope(q, k, positions, table(64)), wide, strict=True):
        assert torch.equal(got, want.to(got.dtype))


def test_scores_depend_on_the_distance_alone() -> None:
    """Property: ⟨rope(q, p), rope(k, r)⟩ is the same for every p with one p − r (Su et al. 2021, eq. 16)."""
    randn = normal(4)
    q, k = randn(1, 1, 64), randn(1, 1, 64)
    scores = []
    for start in (0, 13, 150):
        turned_q, _ = rope(q, k, torch.tensor([start + 9]), table(64))
        _, turned_k = rope(q, k, torch.tensor([start]), table(64))
        scores.append(float((turned_q * turned_k).sum()))
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-3)
