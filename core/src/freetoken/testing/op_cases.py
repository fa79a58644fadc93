"""Inputs for every op: the shapes a kernel is tried at, and seeded tensors that fit them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from freetoken.testing.fakes import normal, stored
from freetoken.vocab.ops import OpShape
from freetoken.vocab.weight import StoredTensor

EPS = 1e-6
STATE_SLOTS = 7


@frozen(eq=False)
class Inputs:
    """One call: positional arguments, the tensors a kernel packs first, and the length of the sums behind a result.

    ``args`` holds ``PACKED`` where the packed weights go. ``experts`` are several weights for a bank.
    """

    args: tuple[Any, ...]
    weights: tuple[StoredTensor, ...] = ()
    experts: tuple[tuple[StoredTensor, ...], ...] = ()
    reduction: int = 1


class _Packed:
    def __repr__(self) -> str:
        return "packed weights"


PACKED = _Packed()
Make = Callable[[OpShape, int, str], Inputs]  # (shape, tokens, device)


@frozen
class OpCases:
    """The sizes to try an op at, and how to make its inputs."""

    make: Make = field(eq=False)
    sizes: tuple[Mapping[str, Any], ...]  # fields of ``OpShape``
    tokens: tuple[int, ...] = (1, 3, 17, 64)

    def shapes(self, op: str, dtype: str) -> tuple[OpShape, ...]:
        return tuple(OpShape(op, dtype, **size) for size in self.sizes)


def _dtype(shape: OpShape) -> torch.dtype:
    found: torch.dtype = getattr(torch, shape.dtype)
    return found


def _randn(shape: OpShape, tokens: int, device: str) -> Callable[..., Tensor]:
    return normal(1000 * tokens + shape.rows + shape.cols, device, _dtype(shape))


def _wide(randn: Callable[..., Tensor], tokens: int, heads: int, dim: int) -> Tensor:
    """``[T, heads, dim]`` as a column range of a fused projection, whose rows are wider."""
    return randn(tokens, 2 * heads * dim)[:, : heads * dim].view(tokens, heads, dim)


def _embedding(shape: OpShape, tokens: int, device: str) -> Inputs:
    randn = normal(tokens, dtype=_dtype(shape))
    ids = torch.randint(0, shape.rows, (tokens,), generator=torch.Generator().manual_seed(tokens)).to(device)
    return Inputs((ids, PACKED), weights=(stored(randn(shape.rows, shape.cols)),))


def _linear(shape: OpShape, tokens: int, device: str) -> Inputs:
    """Two stored tensors are stacked by rows, as fused projections are."""
    weight = normal(7, dtype=torch.float32)(shape.rows, shape.cols) * shape.cols**-0.5
    cut = shape.rows // 3
    pieces = tuple(stored(w.to(_dtype(shape)), f"w{n}") for n, w in enumerate((weight[:cut], weight[cut:])))
    x = _randn(shape, tokens, device)(tokens, shape.cols)
    return Inputs((x, PACKED), weights=pieces, reduction=shape.cols)


def _rms_norm(shape: OpShape, tokens: int, device: str) -> Inputs:
    randn = _randn(shape, tokens, device)
    return Inputs((3 * randn(tokens, shape.cols), randn(shape.cols), EPS), reduction=shape.cols)


def _add_rms_norm(shape: OpShape, tokens: int, device: str) -> Inputs:
    randn = _randn(shape, tokens, device)
    args = (randn(tokens, shape.cols), randn(tokens, shape.cols), randn(shape.cols), EPS)
    return Inputs(args, reduction=shape.cols)


def _gated_rms_norm(shape: OpShape, tokens: int, device: str) -> Inputs:
    randn = _randn(shape, tokens, device)
    x = randn(tokens, shape.kv_heads, shape.v_dim)
    gate = _wide(randn, tokens, shape.kv_heads, shape.v_dim)
    return Inputs((x, gate, randn(shape.v_dim), EPS), reduction=shape.v_dim)


def _l2norm(shape: OpShape, tokens: int, device: str) -> Inputs:
    x = _wide(_randn(shape, tokens, device), tokens, shape.q_heads, shape.head_dim)
    return Inputs((x, EPS), reduction=shape.head_dim)


def _rope(shape: OpShape, tokens: int, device: str) -> Inputs:
    randn = _randn(shape, tokens, device)
    q = _wide(randn, tokens, shape.q_heads, shape.head_dim)
    k = _wide(randn, tokens, shape.kv_heads, shape.head_dim)
    positions = torch.randint(0, 300, (tokens,), generator=torch.Generator().manual_seed(3)).to(device)
    rates = 10000.0 ** (-torch.arange(0, shape.rotary_dim, 2) / shape.rotary_dim)
    angles = torch.arange(300).unsqueeze(1) * rates
    return Inputs((q, k, positions, torch.cat((angles.cos(), angles.sin()), dim=1).to(device)))


def _rope_write(shape: OpShape, tokens: int, device: str) -> Inputs:
    """What ``rope`` and ``write_kv`` get, with norm weights where the shape asks for them."""
    randn = _randn(shape, tokens, device)
    q, k, positions, cos_sin = _rope(shape, tokens, device).args
    _, v, k_pool, v_pool, slots = _write_kv(shape, tokens, device).args
    weights = (randn(shape.head_dim), randn(shape.head_dim)) if shape.cols else (None, None)
    args = (q, k, v, *weights, EPS, positions, cos_sin, k_pool, v_pool, slots)
    return Inputs(args, reduction=shape.cols or 1)


def _silu_and_mul(shape: OpShape, tokens: int, device: str) -> Inputs:
    return Inputs((_randn(shape, tokens, device)(tokens, 2 * shape.intermediate),))


def _write_kv(shape: OpShape, tokens: int, device: str) -> Inputs:
    """Distinct slots in no order, over pools that hold something already."""
    randn = _randn(shape, tokens, device)
    k = _wide(randn, tokens, shape.kv_heads, shape.head_dim)
    v = _wide(randn, tokens, shape.kv_heads, shape.v_dim)
    pages = tokens // 4 + 3
    k_pool = randn(pages, 16, shape.kv_heads, shape.head_dim)
    v_pool = randn(pages, 16, shape.kv_heads, shape.v_dim)
    slots = torch.randperm(pages * 16, generator=torch.Generator().manual_seed(5))[:tokens].to(device)
    return Inputs((k, v, k_pool, v_pool, slots))


def _router_topk(shape: OpShape, tokens: int, device: str) -> Inputs:
    """A shuffled arithmetic progression: no two logits of a row are near enough to change places."""
    generator = torch.Generator().manual_seed(tokens)
    ranks = torch.stack([torch.randperm(shape.experts, generator=generator) for _ in range(tokens)])
    logits = (ranks * (8.0 / shape.experts)).to(device, _dtype(shape))
    return Inputs((logits, shape.top_k, tokens % 2 == 1), reduction=shape.experts)


def _experts(shape: OpShape, tokens: int, device: str) -> Inputs:
    """A bank of more slots than a row chooses, some never chosen."""
    randn = normal(11, dtype=torch.float32)
    hidden, inner = shape.cols, shape.intermediate
    bank = []
    for _ in range(shape.experts):
        gate, up, down = randn(inner, hidden), randn(inner, hidden), randn(hidden, inner)
        pair = (("gate", gate * hidden**-0.5), ("up", up * hidden**-0.5), ("down", down * inner**-0.5))
        bank.append(tuple(stored(w.to(_dtype(shape)), name) for name, w in pair))
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.stack([torch.randperm(shape.experts, generator=generator)[: shape.top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, shape.top_k, generator=generator)
    args = (_randn(shape, tokens, device)(tokens, hidden), weights.to(device), slots.int().to(device), PACKED)
    return Inputs(args, experts=tuple(bank), reduction=hidden + inner)


def ragged(tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and prefix lengths that sum to ``tokens``: few tokens are a decode batch, more a mixed one."""
    if tokens <= 3:
        return (1,) * tokens, tuple(range(tokens))
    return (1, tokens // 2, tokens - tokens // 2 - 1), (9, 0, 5)


def _where(tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    query_lens, prefix_lens = ragged(tokens)
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device)
    slots = torch.tensor([4, 1, 6][: len(query_lens)], device=device)
    return starts, slots, torch.tensor(prefix_lens, dtype=torch.int32, device=device)


def _causal_conv(shape: OpShape, tokens: int, device: str) -> Inputs:
    randn = _randn(shape, tokens, device)
    x = randn(tokens, shape.rows + 32)[:, : shape.rows]
    state = normal(2, device)(STATE_SLOTS, shape.rows, shape.width - 1)
    weight = randn(shape.rows, shape.width)
    return Inputs((x, weight, state, *_where(tokens, device)), reduction=shape.width)


def _gated_delta(shape: OpShape, tokens: int, device: str) -> Inputs:
    randn = normal(tokens, device)
    q, k = randn(tokens, shape.q_heads, shape.head_dim), randn(tokens, shape.q_heads, shape.head_dim)
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    v = randn(tokens, shape.kv_heads, shape.v_dim)
    decay = -torch.nn.functional.softplus(randn(tokens, shape.kv_heads))
    beta = torch.sigmoid(randn(tokens, shape.kv_heads))
    state = randn(STATE_SLOTS, shape.kv_heads, shape.head_dim, shape.v_dim)
    q, k, v = (t.to(_dtype(shape)) for t in (q, k, v))
    return Inputs((q, k, v, decay, beta, state, *_where(tokens, device)), reduction=shape.head_dim * tokens)


def _residual_add(shape: OpShape, tokens: int, device: str) -> Inputs:
    randn = _randn(shape, tokens, device)
    x, residual, shared = (randn(tokens, shape.cols) for _ in range(3))
    return Inputs((x, residual, *((shared, randn(tokens, 1)) if shape.rows else (None, None))))


def _sigmoid_gate(shape: OpShape, tokens: int, device: str) -> Inputs:
    randn = _randn(shape, tokens, device)
    gate = randn(tokens, shape.q_heads, 2 * shape.cols)[..., shape.cols :]
    return Inputs((randn(tokens, shape.q_heads, shape.cols), gate))


def _delta_gates(shape: OpShape, tokens: int, device: str) -> Inputs:
    """Wide enough that the softplus meets both of its ends."""
    randn, exact = _randn(shape, tokens, device), normal(tokens, device)
    return Inputs((8 * randn(tokens, 2 * shape.kv_heads), -exact(shape.kv_heads).abs(), exact(shape.kv_heads)))


def _delta_net(shape: OpShape, tokens: int, device: str) -> Inputs:
    """Queries, keys and values as columns of wider rows; gates as they come out of a product."""
    randn, exact = _randn(shape, tokens, device), normal(tokens, device)
    keys, values = shape.q_heads * shape.head_dim, shape.kv_heads * shape.v_dim
    mixed = randn(tokens, 2 * keys + values + 64)[:, : 2 * keys + values]
    ba, rate, bias = randn(tokens, 2 * shape.kv_heads), -exact(shape.kv_heads).abs(), exact(shape.kv_heads)
    state = exact(STATE_SLOTS, shape.kv_heads, shape.head_dim, shape.v_dim)
    return Inputs((mixed, ba, rate, bias, EPS, state, *_where(tokens, device)), reduction=shape.head_dim * tokens)


def _sample(shape: OpShape, tokens: int, device: str) -> Inputs:
    """Rows with every mixture of temperature, top-k, top-p and min-p, greedy ones among them."""
    randn = normal(tokens, device)
    rows = range(tokens)

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor([values[r % len(values)] for r in rows], dtype=dtype, device=device)

    generator = torch.Generator().manual_seed(tokens)
    seeds = torch.randint(-(2**62), 2**62, (tokens,), generator=generator).to(device)
    steps = torch.randint(0, 5000, (tokens,), generator=generator).to(device)
    return Inputs(
        (
            3 * randn(tokens, shape.rows), column((1.0, 0.0, 0.7, 1.6, 2.0), torch.float32),
            column((0, 1, 5, shape.rows, 40, 0, 3), torch.int32), column((1.0, 0.9, 0.5), torch.float32),
            column((0.0, 0.0, 0.05, 0.3), torch.float32), seeds, steps,
        )
    )  # fmt: skip


OP_CASES: Mapping[str, OpCases] = {
    "embedding": OpCases(_embedding, ({"rows": 96, "cols": 64}, {"rows": 50, "cols": 128})),
    "linear": OpCases(_linear, ({"rows": 96, "cols": 64}, {"rows": 48, "cols": 512}, {"rows": 1, "cols": 64})),
    "rms_norm": OpCases(
        _rms_norm, ({"cols": 64}, {"cols": 576}, {"cols": 128, "q_heads": 4, "kv_heads": 2}, {"cols": 2048})
    ),
    "add_rms_norm": OpCases(_add_rms_norm, ({"cols": 64}, {"cols": 576}, {"cols": 2048})),
    "gated_rms_norm": OpCases(_gated_rms_norm, ({"cols": 128, "kv_heads": 4, "v_dim": 128},)),
    "l2norm": OpCases(_l2norm, ({"cols": 128, "q_heads": 3, "head_dim": 128},)),
    "rope": OpCases(
        _rope,
        (
            {"q_heads": 9, "kv_heads": 3, "head_dim": 64, "rotary_dim": 64},
            {"q_heads": 4, "kv_heads": 4, "head_dim": 128, "rotary_dim": 32},
            {"q_heads": 2, "kv_heads": 1, "head_dim": 80, "rotary_dim": 80},
        ),
    ),
    "silu_and_mul": OpCases(_silu_and_mul, ({"intermediate": 64}, {"intermediate": 1536})),
    "write_kv": OpCases(
        _write_kv,
        ({"kv_heads": 3, "head_dim": 64, "v_dim": 64}, {"kv_heads": 1, "head_dim": 128, "v_dim": 64}),
    ),
    "rope_write": OpCases(
        _rope_write,
        (
            {"q_heads": 9, "kv_heads": 3, "head_dim": 64, "v_dim": 64, "rotary_dim": 64},
            {"q_heads": 4, "kv_heads": 2, "head_dim": 128, "v_dim": 64, "rotary_dim": 32, "cols": 128},
            {"q_heads": 2, "kv_heads": 1, "head_dim": 80, "v_dim": 80, "rotary_dim": 80, "cols": 80},
        ),
    ),
    "router_topk": OpCases(_router_topk, ({"experts": 8, "top_k": 2}, {"experts": 128, "top_k": 8})),
    "experts": OpCases(_experts, ({"cols": 64, "intermediate": 32, "experts": 6, "top_k": 2},)),
    "causal_conv": OpCases(_causal_conv, ({"rows": 96, "width": 4}, {"rows": 64, "width": 2})),
    "gated_delta": OpCases(
        _gated_delta,
        (
            {"q_heads": 2, "kv_heads": 4, "head_dim": 32, "v_dim": 64},
            {"q_heads": 2, "kv_heads": 2, "head_dim": 128, "v_dim": 128},
        ),
        tokens=(1, 3, 17, 150),
    ),
    "residual_add": OpCases(_residual_add, ({"cols": 576}, {"cols": 64, "rows": 1}, {"cols": 2048, "rows": 1})),
    "sigmoid_gate": OpCases(_sigmoid_gate, ({"cols": 64, "q_heads": 3}, {"cols": 256, "q_heads": 4})),
    "delta_gates": OpCases(_delta_gates, ({"kv_heads": 4}, {"kv_heads": 32})),
    "delta_net": OpCases(
        _delta_net,
        (
            {"q_heads": 2, "kv_heads": 4, "head_dim": 32, "v_dim": 64},
            {"q_heads": 2, "kv_heads": 4, "head_dim": 128, "v_dim": 128},
        ),
        tokens=(1, 3, 17, 150),
    ),
    "sample": OpCases(_sample, ({"rows": 300}, {"rows": 1000})),
}
