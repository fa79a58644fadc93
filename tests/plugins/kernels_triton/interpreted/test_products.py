"""Linear and experts: every form, uneven depths, skewed routing, slots that are not there."""

from __future__ import annotations

import pytest
import torch

from freetoken.ops import experts as reference
from freetoken.vocab.hardware import Device
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton import experts_tiles
from freetoken_kernels_triton import linear as linear_module
from freetoken_kernels_triton.experts_tiles import choose_form

DTYPES = ["float32", "float16"]


def _random(dtype: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(getattr(torch, dtype))


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(37, 72), (1, 64), (64, 2176)])
def test_linear_matches_a_float32_product(kernel, close, rows, outputs, inputs):
    x, weight = _random("float16", rows, 2 * inputs)[:, :inputs], _random("float16", outputs, inputs, scale=0.05)
    if rows == 1:
        x = x.contiguous()
    got = kernel("linear", "float16", rows=outputs, cols=inputs)(x, weight)
    close(got, x.float() @ weight.float().T, scale=2)


class Case:
    """Experts of uneven sizes and their interleaved bank."""

    def __init__(self, dtype: str, tokens: int, experts: int, top_k: int, hidden: int, inner: int) -> None:
        self.hidden = _random(dtype, tokens, hidden)
        self.slots = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(torch.int32)
        self.weights = torch.rand(tokens, top_k)
        gate, up = (_random(dtype, experts, inner, hidden, scale=hidden**-0.5) for _ in range(2))
        self.down = _random(dtype, experts, hidden, inner, scale=inner**-0.5)
        self.bank = {"gate_up": torch.stack((gate, up), 2).reshape(experts, 2 * inner, hidden), "down": self.down}
        self.plain = {"gate_up": torch.cat((gate, up), 1).float(), "down": self.down.float()}
        self.sizes = {"cols": hidden, "experts": experts, "top_k": top_k, "intermediate": inner}

    def want(self) -> torch.Tensor:
        weights = self.weights.masked_fill(self.slots < 0, 0.0)
        return reference.experts(self.hidden.float(), weights, self.slots.clamp(min=0), self.plain)


# (tokens, experts, top_k, hidden, inner) and the form they take
CASES = [
    ((1, 6, 2, 72, 40), "pair"),
    ((4, 6, 2, 64, 256), "pair"),
    ((5, 6, 2, 72, 40), "slot"),
    ((33, 3, 2, 64, 32), "slot"),
    ((257, 4, 2, 72, 40), "tile"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "form"), CASES)
def test_experts_match_the_float32_sum(kernel, close, dtype, sizes, form):
    case = Case(dtype, *sizes)
    shape = OpShape("experts", dtype, **case.sizes)
    assert choose_form(sizes[0], shape, Device(multiprocessors=4, shared_memory_bytes=99 * 1024)).name == form
    got = kernel("experts", dtype, **case.sizes)(case.hidden, case.weights, case.slots, case.bank)
    close(got, case.want(), scale=3)


@pytest.mark.parametrize("tokens", [3, 40, 257])
def test_slots_below_zero_contribute_nothing(kernel, close, tokens):
    case = Case("float32", tokens, 4, 2, 64, 32)
    case.slots[torch.rand(case.slots.shape) < 0.4] = -1
    got = kernel("experts", "float32", **case.sizes)(case.hidden, case.weights, case.slots, case.bank)
    close(got, case.want(), scale=3)


@pytest.mark.parametrize("tokens", [40, 300])
def test_all_tokens_of_one_expert_and_a_bank_of_more_slots(kernel, close, tokens):
    case = Case("float32", tokens, 5, 1, 64, 32)
    case.slots.fill_(3)
    got = kernel("experts", "float32", **{**case.sizes, "experts": 2})(case.hidden, case.weights, case.slots, case.bank)
    close(got, case.want(), scale=3)


def test_large_tiles_match_the_float32_sum(kernel, close):
    case = Case("float16", 260, 2, 2, 64, 32)  # 260 pairs an expert: tiles of 128 rows
    got = kernel("experts", "float16", **case.sizes)(case.hidden, case.weights, case.slots, case.bank)
    close(got, case.want(), scale=3)


@pytest.mark.parametrize("variant", sorted(experts_tiles.PAIR_VARIANTS))
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_every_variant_of_few_tokens_matches_the_float32_sum(kernel, close, monkeypatch, variant, top_k):
    """The tables that are there to be measured; numbers of experts that are no power of two."""
    monkeypatch.setattr(experts_tiles, "PAIR_VARIANT", variant)
    case = Case("float32", 2, 9, top_k, 72, 40)
    case.slots[0, 0] = -1
    got = kernel("experts", "float32", **case.sizes)(case.hidden, case.weights, case.slots, case.bank)
    close(got, case.want(), scale=3)


@pytest.mark.parametrize("variant", sorted(linear_module.GEMV_VARIANTS))
def test_every_variant_of_one_row_matches_a_float32_product(kernel, close, monkeypatch, variant):
    monkeypatch.setattr(linear_module, "GEMV_VARIANT", variant)
    x, weight = _random("float16", 1, 2176), _random("float16", 37, 2176, scale=0.05)
    close(kernel("linear", "float16", rows=37, cols=2176)(x, weight), x.float() @ weight.float().T, scale=2)
