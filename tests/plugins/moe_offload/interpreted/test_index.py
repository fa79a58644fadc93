"""The look-up and the fetch by kernels against the same in torch."""

from __future__ import annotations

import random

import pytest
import torch

from freetoken.plugin.protocols import BankPart
from freetoken_moe_offload.device_index import KernelFetch, KernelIndex
from freetoken_moe_offload.index import HEADER, IndexState, TorchIndex, fill, make_state
from freetoken_moe_offload.launches import MARK_PAIRS, Shape

CPU = torch.device("cpu")
TENSORS = ("owner", "slot_of", "last", "used", "clock", "wanted", "kind", "target", "counters")


def assert_equal(left: IndexState, right: IndexState, told: str) -> None:
    for name in TENSORS:
        assert torch.equal(getattr(left, name), getattr(right, name)), f"{name} {told}"
    count = int(left.lists[0])
    assert int(right.lists[0]) == count
    assert torch.equal(left.fetch_experts[:count], right.fetch_experts[:count]), told
    assert torch.equal(left.fetch_slots[:count], right.fetch_slots[:count]), told


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize(
    ("layers", "experts", "slots", "top_k"), [(3, 16, 20, 2), (2, 12, 5, 3), (2, 40, 41, 4), (1, 8, 2, 2)]
)
def test_kernels_equal_torch(layers: int, experts: int, slots: int, top_k: int, decay: bool) -> None:
    """Oracle: ``TorchIndex``, every tensor bit for bit after every look-up; short half-lives, so that counts decay."""
    rng, half_life = random.Random(slots), 3
    torch_index = TorchIndex(decay, half_life)
    kernels = KernelIndex(Shape(experts, slots, decay, half_life))
    one, two = (make_state(layers, experts, slots, CPU) for _ in range(2))
    for state in (one, two):
        fill(state, list(range(min(slots, layers * experts) - 1)))
    for step in range(12):
        tokens = 600 if step == 5 else rng.choice([1, 1, 2, 5])
        routed = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
        touch, keep, cause = rng.choice([(True, False, 0), (False, True, 1)])
        row = rng.randrange(layers)
        passes = -(-min(routed.numel(), experts) // slots)
        for number in range(passes):
            given = {
                "first": number * slots,
                "final": number == passes - 1,
                "touch": touch,
                "keep": keep,
                "cause": cause,
            }
            expected = torch_index.look_up(one, routed, row, **given)
            got = kernels.look_up(two, routed, row, **given)
            assert torch.equal(got, expected), f"step {step}, pass {number}"
            assert_equal(one, two, f"after step {step}, pass {number}")
    assert 600 * top_k > MARK_PAIRS


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (24, 16)), ("bfloat16", (3, 5000)), ("uint8", (7,))])
def test_fetch_moves_what_is_listed(dtype: str, shape: tuple[int, ...]) -> None:
    """Oracle: indexed assignment; slots that are not listed keep what they held."""
    part = BankPart("part", dtype, shape)
    host = torch.randint(0, 100, (6, *shape)).to(getattr(torch, dtype))
    bank = torch.zeros(9, *shape, dtype=host.dtype)
    state = make_state(1, 6, 9, CPU)
    pairs = [(4, 8), (0, 3), (5, 0)]
    state.lists[0] = len(pairs)
    for n, (expert, slot) in enumerate(pairs):
        state.fetch_experts[n], state.fetch_slots[n] = expert, slot
    expected = bank.clone()
    for expert, slot in pairs:
        expected[slot] = host[expert]
    KernelFetch((part,), state.room, 2, timed=False).run(state, {"part": host}, {"part": bank})
    assert torch.equal(bank, expected)
    assert HEADER == 4
