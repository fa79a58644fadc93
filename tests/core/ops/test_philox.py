"""The generator against published test vectors, Triton's own function and its scalar twin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetoken.ops.philox import philox_word, philox_words, uniform

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_published_vectors() -> None:
    """Oracle: the first word of Random123's known answers (kat_vectors, philox4x32 10) whose counter fits a step."""
    assert philox_word(0, 0) == 0x6627E8D5


@given(st.lists(st.tuples(INT64, st.integers(0, 2**40)), min_size=1, max_size=40))
def test_tensors_and_integers_agree(pairs: list[tuple[int, int]]) -> None:
    """Oracle: two implementations, over all 64-bit seeds."""
    seeds, steps = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert philox_words(seeds, steps).tolist() == [philox_word(*pair) for pair in pairs]


def test_uniform_is_uniform() -> None:
    """Oracle: chi-square over 100 cells of 50,000 numbers along the steps, and along the seeds."""
    many = torch.arange(50_000)
    for u in (uniform(torch.full_like(many, 7), many), uniform(many, torch.full_like(many, 7))):
        assert float(u.min()) >= 0
        assert float(u.max()) < 1
        counts = torch.histc(u, bins=100, min=0, max=1).double()
        statistic = float(((counts - 500) ** 2 / 500).sum())
        assert abs(statistic - 99) < 5 * (2 * 99) ** 0.5


def test_few_and_many_rows_agree() -> None:
    """Oracle: the other path: few rows on a CPU go through plain integers."""
    seeds, steps = torch.arange(-40, 40) * 2**55, torch.arange(80) * 37
    many = uniform(seeds, steps)
    few = torch.cat([uniform(a, b) for a, b in zip(seeds.split(8), steps.split(8), strict=True)])
    assert torch.equal(many, few)


TRITON = """
import torch, triton, triton.language as tl
from freetoken.ops.philox import uniform

@triton.jit
def fill(seeds, steps, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.rand(tl.load(seeds + at), tl.load(steps + at)))

seeds = torch.tensor([0, 1, -1, 2**62, -2**63, 123456789, 7, 7] * 4)
steps = torch.arange(32) * 1001
out = torch.empty(32)
fill[(1,)](seeds, steps, out, 32)
assert torch.equal(out, uniform(seeds, steps)), (out, uniform(seeds, steps))
"""


def test_equals_tritons_rand(tmp_path: Path) -> None:
    """Oracle: ``tl.rand(seed, step)`` in Triton's interpreter, bit for bit."""
    pytest.importorskip("triton")
    script = tmp_path / "philox_in_triton.py"
    script.write_text(TRITON)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
