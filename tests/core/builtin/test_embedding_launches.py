"""What the reference's embedding declares. Oracle: calls of torch that the sweep makes, recorded on meta tensors."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from freetoken.builtin.kernels_torch import FEW_ROWS, INDEX_32_ELEMENTS, embedding_launches
from freetoken.ops import embedding
from freetoken.testing.launch_trace import MetaDevice
from freetoken.testing.launches import DEVICES, small_space
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import LibraryCall, StepPoint
from freetoken.vocab.ops import OpShape
from freetoken.warmup.launch_space import build_launch_space
from freetoken.warmup.survey import survey

POINT = StepPoint(5, 1, 5, 5, 1, decode=False)
SHAPE = OpShape("embedding", "bfloat16", rows=151_936, cols=2048)
META = MetaDevice("cuda", 0, "meta", (9, 0), 132, 232_448)


def swept(shape: OpShape, tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands of the one call that a sweep makes."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(embedding, "embedding", lambda tokens, packed: calls.append((tokens, packed)))
    (call,) = embedding_launches(POINT, shape, META)
    assert isinstance(call, LibraryCall)
    call.sweep(tokens)
    ((indices, matrix),) = calls
    return indices, matrix


@pytest.mark.parametrize("tokens", [1, 16, 17, 8192])
def test_a_sweep_makes_the_call_of_a_step_in_its_dtypes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    indices, matrix = swept(SHAPE, tokens, monkeypatch)
    assert (indices.shape, indices.dtype) == ((tokens,), torch.int64)
    assert (matrix.shape, matrix.dtype) == ((FEW_ROWS, 2048), torch.bfloat16)


def test_a_matrix_that_needs_wide_addresses_is_swept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = evolve(SHAPE, rows=INDEX_32_ELEMENTS // 2048 + 1)
    assert swept(huge, 3, monkeypatch)[1].shape == (huge.rows, 2048)
    assert swept(evolve(SHAPE, rows=10), 3, monkeypatch)[1].shape == (10, 2048)


def test_the_sweep_gets_every_number_of_tokens_that_a_step_can_have() -> None:
    space = build_launch_space(small_space(300), [("embed", ((SHAPE, embedding_launches),))], DEVICES["h200"])
    (use,) = survey(space).libraries
    assert (use.low, use.high, use.row_counts) == (1, 300, ())
    assert space.opaque == ()


def test_a_cpu_has_nothing_to_load() -> None:
    assert embedding_launches(POINT, SHAPE, Device("cpu")) == ()
