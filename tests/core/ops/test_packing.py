"""Dense packing: stacking, casting, copying, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from freetoken.ops.packing import pack_dense, pack_expert
from freetoken.testing.fakes import dequantise_plain, normal, stored
from freetoken.vocab.errors import CheckpointError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacks_rows_in_order(dtype: torch.dtype) -> None:
    """Oracle: torch.cat of what was stored, cast once."""
    randn = normal(1)
    pieces = [randn(3, 8), randn(5, 8).bfloat16(), randn(1, 8)]
    packed = pack_dense([stored(p) for p in pieces], dequantise_plain, dtype, "cpu")
    assert torch.equal(packed, torch.cat([p.float() for p in pieces]).to(dtype))


def test_keeps_nothing_of_the_file() -> None:
    """Oracle: the packed copy after the stored tensor was overwritten."""
    data = normal(2)(4, 4)
    packed = pack_dense([stored(data)], dequantise_plain, torch.float32, "cpu")
    before = packed.clone()
    data.zero_()
    assert torch.equal(packed, before)


def test_an_expert_has_gate_before_up() -> None:
    """Oracle: the bank layout's definition."""
    randn = normal(3)
    gate, up, down = randn(2, 6), randn(2, 6), randn(6, 2)
    packed = pack_expert([stored(t) for t in (gate, up, down)], dequantise_plain, torch.float32, "cpu")
    assert torch.equal(packed["gate_up"], torch.cat((gate, up)))
    assert torch.equal(packed["down"], down)


@pytest.mark.parametrize("shapes", [[], [(2, 4), (2, 5)], [(8,)]])
def test_what_cannot_be_stacked_is_refused(shapes: list[tuple[int, ...]]) -> None:
    """Oracle: the documented error."""
    with pytest.raises(CheckpointError, match="equal width"):
        pack_dense([stored(torch.zeros(s)) for s in shapes], dequantise_plain, torch.float32, "cpu")


@pytest.mark.parametrize("shapes", [[(2, 6), (2, 6)], [(2, 6), (3, 6), (6, 2)], [(2, 6), (2, 6), (2, 6)]])
def test_what_is_no_expert_is_refused(shapes: list[tuple[int, ...]]) -> None:
    """Oracle: the documented error; it names the tensors."""
    with pytest.raises(CheckpointError, match="weight"):
        pack_expert([stored(torch.zeros(s)) for s in shapes], dequantise_plain, torch.float32, "cpu")
