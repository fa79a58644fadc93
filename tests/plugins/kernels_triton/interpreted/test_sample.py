"""The sampler: equal to the sorting reference, row by row, on every path through the kernel."""

from __future__ import annotations

import pytest
import torch

from freetoken.ops import sampling


def _rows(count: int, **settings: float) -> dict[str, torch.Tensor]:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    kinds = {"top_k": torch.int32}
    rows = {name: torch.full((count,), value, dtype=kinds.get(name, torch.float32)) for name, value in given.items()}
    return {**rows, "seeds": torch.randint(-(2**62), 2**62, (count,)), "steps": torch.randint(0, 2**40, (count,))}


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 3, "top_p": 0.8},
    {"top_k": 2500},  # more than fit into the candidates
    {"top_p": 0.3},
    {"top_p": 0.999, "temperature": 2.0},  # flat: the whole row
    {"min_p": 0.2},
    {"min_p": 1e-4, "temperature": 2.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.6},
]


@pytest.mark.parametrize(
    ("vocab", "settings"), [*((3001, s) for s in SETTINGS), (1000, SETTINGS[3]), (1000, SETTINGS[-1])], ids=str
)
def test_same_tokens_as_the_reference(kernel, vocab, settings):
    """Oracle: the reference that sorts. Both draw with the same number, so tokens are equal but for a rounding of the
    running sum, which one row in thousands sees."""
    count = 2
    logits = torch.randn(count, vocab) * 3
    rows = _rows(count, **settings)
    want = sampling.sample(logits, **rows)
    got = kernel("sample", "float32", rows=vocab)(logits, *rows.values())
    assert torch.equal(got, want)


def test_greedy_takes_the_lowest_of_equals(kernel):
    logits = torch.randn(4, 1000).round()
    rows = _rows(4, temperature=0.0, top_p=0.5)
    got = kernel("sample", "float32", rows=1000)(logits, *rows.values())
    assert torch.equal(got, logits.argmax(-1))


def test_ties_at_the_cut_stay(kernel):
    """Property: tokens equal to the k-th survive, so every one of many equals can be drawn."""
    logits = torch.zeros(1, 1000)
    logits[0, 500:] = -9.0
    call = kernel("sample", "float32", rows=1000)
    rows = _rows(1, top_k=2)
    drawn = set()
    for step in range(6):
        rows["steps"].fill_(step)
        drawn.add(int(call(logits, *rows.values())))
    assert len(drawn) > 1
    assert max(drawn) < 500


def test_masked_logits_are_never_drawn(kernel):
    logits = torch.full((2, 1000), float("-inf"))
    logits[0, 777] = 0.5
    logits[1, 3:5] = 0.0
    for settings in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        got = kernel("sample", "float32", rows=1000)(logits, *_rows(2, **settings).values())
        assert int(got[0]) == 777
        assert int(got[1]) in (3, 4)


def test_rows_do_not_see_each_other(kernel):
    """Property: a row alone draws what it draws in a batch of unlike rows."""
    logits = torch.randn(3, 1000)
    parts = [_rows(1, **s) for s in ({"temperature": 0.0}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1})]
    rows = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
    call = kernel("sample", "float32", rows=1000)
    together = call(logits, *rows.values())
    alone = torch.cat([call(logits[i : i + 1].clone(), *parts[i].values()) for i in range(3)])
    assert torch.equal(together, alone)
