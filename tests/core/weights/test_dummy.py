"""Made-up weights; oracle: the distribution and the constants that `--load-format dummy` promises."""

from __future__ import annotations

import pytest
import torch

from freetoken.vocab.weight import WeightSlot
from freetoken.weights.dummy import dummy_weights

SLOTS = (
    WeightSlot("w", "linear", (), (200, 300)),
    WeightSlot("expert", "experts", (), (64, 32)),
    WeightSlot("norm", "vector", (), (8,)),
    WeightSlot("offset_norm", "vector", (), (8,), add=1.0),
    WeightSlot("q.bias", "vector", (), (8,)),
    WeightSlot("conv", "vector", (), (4, 1, 3), dtype="float32"),
)


def made(*slots: WeightSlot, dtype: str = "float32", seed: int = 0) -> dict[str, torch.Tensor]:
    return {t.name: t.parts["data"] for _, tensors in dummy_weights(slots, dtype=dtype, seed=seed) for t in tensors}


def test_shapes_constants_and_spread() -> None:
    weights = made(*SLOTS)
    assert {n: tuple(t.shape) for n, t in weights.items()} == {
        "w": (200, 300), "expert.gate": (32, 64), "expert.up": (32, 64), "expert.down": (64, 32), "norm": (8,),
        "offset_norm": (8,), "q.bias": (8,), "conv": (4, 1, 3),
    }  # fmt: skip
    assert [weights[n].unique().tolist() for n in ("norm", "offset_norm", "q.bias")] == [[1.0], [0.0], [0.0]]
    assert weights["w"].mean().item() == pytest.approx(0, abs=3e-4)
    assert weights["w"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights["conv"].std() > 0


def test_numbers_depend_on_name_and_seed_alone() -> None:
    """Oracle: the same slot among others, alone, and under another seed."""
    among, alone = made(*SLOTS), made(SLOTS[0])
    assert torch.equal(among["w"], alone["w"])
    assert not torch.equal(alone["w"], made(SLOTS[0], seed=1)["w"])
    assert not torch.equal(among["expert.gate"], among["expert.up"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_are_plain_in_the_compute_dtype(dtype: str) -> None:
    for _, tensors in dummy_weights(SLOTS, dtype=dtype):
        for tensor in tensors:
            assert tensor.format == dtype
            assert str(tensor.parts["data"].dtype) == f"torch.{tensor.format}"
