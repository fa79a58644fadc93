"""The probes' generator. Oracles: its own promises, checked one by one, and the import graph."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.warmup import probes as module
from freetoken.warmup.probes import DRAWN_CHUNKS, OUTPUT_TOKENS, SAMPLING, TOUCHES, ServerLimits, lengths, probes

LIMITS = ServerLimits(longest=40_960, chunk=8192, running=32, page=16, vocabulary=151_936, kv_tokens=400_000)
limits = st.builds(
    ServerLimits,
    longest=st.integers(8, 50_000),
    chunk=st.integers(1, 9000),
    running=st.integers(1, 300),
    page=st.sampled_from((1, 16, 64)),
    vocabulary=st.integers(10, 250_000),
    kv_tokens=st.integers(64, 500_000),
)


def test_it_looks_at_nothing_of_the_warmup() -> None:
    """Oracle: the imports of the file. A list shared with the plan would prove nothing."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    named = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    named += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert not [name for name in named if name.startswith("freetoken")]


def test_two_hundred_hold_all_that_a_certificate_names() -> None:
    found = probes(LIMITS, 200, seed=0)
    assert len(set(found)) == 200
    sizes = {p.tokens for p in found}
    assert sizes >= {1, 15, 16, 17, 8191, 8192, 8193, 40_960 - OUTPUT_TOKENS}
    primes = {n for n in sizes if n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))}
    assert len(primes) > 10
    batches = {p.batch for p in found}
    assert batches >= {1, 2, 32}
    assert any(b % 2 and b > 1 for b in batches)
    prefixes = {p.prefix for p in found}
    assert 0 in prefixes
    assert any(n and n % 16 == 0 for n in prefixes)
    assert any(n % 2 for n in prefixes)
    assert {p.sampling for p in found if p.batch > 1} == set(SAMPLING)
    assert {p.sampling for p in found if p.batch == 1} == set(SAMPLING)


def test_the_seed_decides_and_another_seed_differs() -> None:
    assert probes(LIMITS, 200, 1) == probes(LIMITS, 200, 1)
    assert probes(LIMITS, 200, 1) != probes(LIMITS, 200, 2)
    order = [p.tokens for p in probes(LIMITS, 200, 1)]
    assert order != sorted(order)


@given(limits, st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_probe_can_be_served(limits: ServerLimits, count: int, seed: int) -> None:
    for probe in probes(limits, count, seed):
        assert probe.new >= 1
        assert probe.tokens + OUTPUT_TOKENS <= max(limits.longest, 1 + OUTPUT_TOKENS)
        assert 1 <= probe.batch <= limits.running
        assert probe.batch == 1 or probe.batch * (probe.tokens + OUTPUT_TOKENS) <= limits.kv_tokens
        body = probe.body(random.Random(0), limits.vocabulary, [1] * probe.prefix)
        prompts = body["prompt"] if probe.batch > 1 else [body["prompt"]]
        assert [len(p) for p in prompts] == [probe.tokens] * probe.batch
        assert all(0 <= token < limits.vocabulary for p in prompts for token in p)


@pytest.mark.parametrize("longest", [4, 20, 500])
def test_lengths_end_at_the_longest(longest: int) -> None:
    small = ServerLimits(longest, 64, 4, 16, 1000, 10_000)
    assert max(lengths(small)) == longest - OUTPUT_TOKENS
    assert min(lengths(small)) == 1


def test_prompts_of_one_probe_share_the_prefix_alone() -> None:
    """Otherwise the second touch would find the first one's pages, and be no measure of the first."""
    probe = module.Probe("x", 50, 16, 2, "greedy")
    chance = random.Random(3)
    first = probe.body(chance, 1000, list(range(16)))["prompt"]
    again = probe.body(chance, 1000, list(range(16)))["prompt"]
    assert first[0][:16] == again[1][:16] == list(range(16))
    assert len({tuple(p[16:]) for p in (*first, *again)}) == 4


@given(limits, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_what_all_probes_compute_is_bounded(limits: ServerLimits, seed: int) -> None:
    """Oracle: the bound worked out from the limits. Batches of long prompts would take millions of tokens."""
    found = probes(limits, 200, seed)
    drawn = [p.computed_tokens for p in found if p.name == "drawn"]
    short = TOUCHES * 40 * max(limits.running, 1)
    assert sum(drawn) <= DRAWN_CHUNKS * limits.chunk + len(drawn) * short
    long = [p for p in found if p.name.startswith("length") and p.new > limits.chunk + 1]
    assert {p.tokens for p in long} <= {max(1, limits.longest - OUTPUT_TOKENS)}
