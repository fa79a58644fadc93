"""The real engine in every size of everything, on tiny random models of three kinds.

Oracle: each prompt alone, whole, without a cache. Cached, evicted, chunked, batched, preempted, overlapped and repeated
runs must give the same greedy tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken import LLM, SamplingParams
from freetoken.kv.audit import audit
from freetoken.models import llama, qwen3_5_moe, qwen3_moe
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.plain_answers import PlainAnswers

FAMILIES = {"dense": llama.FAMILY, "experts": qwen3_moe.FAMILY, "hybrid": qwen3_5_moe.FAMILY}
LONGEST = 160
STEMS = [[(i * i * 7 + i * 3 + k * 11) % 251 for i in range(120)] for k in range(3)]


@frozen
class Subject:
    """A tiny model on disk and its plain answers."""

    path: Path
    family: ModelFamilySpec
    plain: PlainAnswers

    @property
    def state_bytes(self) -> int:
        return self.family.read_config(self.family.tiny(), "float32").state_slot_bytes


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    family = FAMILIES[request.param]
    path = write_tiny(family, tmp_path_factory.mktemp(request.param), seed=3)
    with PlainAnswers(path, max_seq_len=LONGEST, threads=1) as plain:
        yield Subject(path, family, plain)


asks = st.tuples(
    st.integers(0, len(STEMS) - 1),
    st.integers(0, 110),  # tokens of that stem
    st.integers(1, 12),  # and of its own
    st.integers(1, 24),  # tokens wanted
    st.sampled_from([1, 1, 1, 2, 4]),  # n
)
crowds = st.lists(asks, min_size=1, max_size=6)
sizes = st.fixed_dictionaries(
    {
        "page_tokens": st.sampled_from([4, 16]),
        "max_running_requests": st.integers(1, 6),
        "max_prefill_tokens": st.integers(1, 40) | st.just(LONGEST),
        "spare_tokens": st.sampled_from([0, 0, 16, 64, 400]),  # of the cache, beyond the longest request
        "snapshots": st.integers(0, 4),
        "overlap": st.booleans(),
        "prefix_cache": st.sampled_from([True, True, True, False]),
    }
)


def prompt_of(ask: tuple[int, int, int, int, int]) -> list[int]:
    stem, shared, own, _, _ = ask
    return [*STEMS[stem][:shared], *((shared + i * 5) % 17 for i in range(own))]


def make(subject: Subject, longest: int, spare_tokens: int, snapshots: int, overlap: bool, **sizes: Any) -> LLM:
    llm = LLM(
        str(subject.path), dtype="float32", threads=1, max_seq_len=LONGEST, kv_tokens=longest + spare_tokens,
        snapshot_bytes=snapshots * subject.state_bytes, **sizes,
    )  # fmt: skip
    llm.running.core.overlap = overlap
    return llm


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@given(rounds=st.lists(crowds, min_size=1, max_size=3), sizes=sizes)
def test_every_run_gives_the_plain_tokens(subject: Subject, rounds: list[Any], sizes: dict[str, Any]) -> None:
    """Several crowds, one after the other on one cache; then nothing is held."""
    longest = max(len(prompt_of(ask)) + ask[3] for crowd in rounds for ask in crowd)
    with make(subject, longest, **sizes) as llm:
        for crowd in rounds:
            wanted = [(prompt_of(ask), ask[3]) for ask in crowd for _ in range(ask[4])]
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in wanted]
            answers = llm.generate([prompt for prompt, _ in wanted], params)
            for (prompt, tokens), answer in zip(wanted, answers, strict=True):
                expected = subject.plain.answer(prompt, tokens)
                assert len(answer.token_ids) == tokens
                assert answer.token_ids[: len(expected)] == expected
            audit(llm.running.built.cache)
            assert llm.running.built.cache.stats().pages_used == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_the_ways_to_the_answer_are_really_taken(subject: Subject, overlap: bool) -> None:
    """Hits, evictions, chunks, batches and preemptions all happen in one crowd on a cache for two requests."""
    crowd = [(k % 3, 100 - k % 2, 2 + k, 24, 1) for k in range(12)]
    longest = max(len(prompt_of(ask)) + ask[3] for ask in crowd)
    with make(
        subject, longest, spare_tokens=100, snapshots=2, overlap=overlap, max_running_requests=4, max_prefill_tokens=32
    ) as llm:
        for _ in range(2):
            answers = llm.generate(
                [prompt_of(ask) for ask in crowd], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            )
            for ask, answer in zip(crowd, answers, strict=True):
                expected = subject.plain.answer(prompt_of(ask), 24)
                assert answer.token_ids[: len(expected)] == expected
        stats = llm.running.built.cache.stats()
        assert stats.hit_tokens > 0
        assert stats.evictions > 0
        assert llm.running.core.scheduler.preemptions > 0
        assert stats.pages_used == 0
