"""The causal convolution against torch's conv1d over whole sequences, however they are cut into steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.ops.causal_conv import causal_conv
from freetoken.testing.fakes import normal
from freetoken.testing.tolerances import assert_close

SLOTS = 5


def whole(x: Tensor, weight: Tensor) -> Tensor:
    """One sequence at once: ``x [L, C]``."""
    padded = F.pad(x.double().T.unsqueeze(0), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight.double().unsqueeze(1), groups=x.shape[1]))[0].T


def step(pieces: list[Tensor], prefixes: list[int], slots: list[int], weight: Tensor, state: Tensor) -> list[Tensor]:
    starts = torch.tensor([0, *torch.tensor([len(p) for p in pieces]).cumsum(0).tolist()], dtype=torch.int32)
    where = (starts, torch.tensor(slots), torch.tensor(prefixes, dtype=torch.int32))
    return list(causal_conv(torch.cat(pieces), weight, state, *where).split([len(p) for p in pieces]))


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=4),
    width=st.sampled_from([2, 4]),
)
def test_any_cutting_gives_the_whole(cuts: list[list[int]], width: int) -> None:
    """Property: three ragged steps equal conv1d over each whole sequence; slots hold garbage before."""
    randn = normal(len(cuts))
    weight, state = randn(6, width), 100 * randn(SLOTS, 6, width - 1)
    sequences = [randn(sum(lens), 6) for lens in cuts]
    slots = [3, 0, 4, 1][: len(cuts)]
    done = [0] * len(cuts)
    outs: list[list[Tensor]] = [[] for _ in cuts]
    for n in range(3):
        pieces = [x[d : d + lens[n]] for x, d, lens in zip(sequences, done, cuts, strict=True)]
        for b, out in enumerate(step(pieces, done, slots, weight, state)):
            outs[b].append(out)
            done[b] += cuts[b][n]
    for b, x in enumerate(sequences):
        assert_close(torch.cat(outs[b]), whole(x, weight), "float32", width)


def test_state_is_the_last_inputs_and_others_are_left_alone() -> None:
    """Oracle: the definition, for a sequence shorter than the state and one longer."""
    randn = normal(1)
    weight, state = randn(4, 4), randn(SLOTS, 4, 3)
    before, short, long = state.clone(), randn(2, 4), randn(9, 4)
    step([short, long], [6, 0], [2, 4], weight, state)
    torch.testing.assert_close(state[2], torch.cat((before[2][:, 2:], short.T), dim=1))
    torch.testing.assert_close(state[4], long[-3:].T)
    assert torch.equal(state[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_inputs(dtype: str) -> None:
    """Oracle: conv1d in float64 on the rounded inputs."""
    randn = normal(2, dtype=getattr(torch, dtype))
    x, weight = randn(12, 8), randn(8, 4)
    (out,) = step([x], [0], [1], weight, torch.zeros(SLOTS, 8, 3))
    assert out.dtype == x.dtype
    assert_close(out, whole(x, weight), dtype, 4)
