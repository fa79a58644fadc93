"""Whole engines on tiny checkpoints. Oracle of every test: the tokens of ``resident``, each prompt alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from freetoken import LLM, SamplingParams
from freetoken.schedule.engine_core import EngineCore

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def check_slots(llm: LLM) -> None:
    """No slot has two owners and no expert two slots: ``owners`` compares both tables."""
    for cache in llm.running.built.moe._caches:
        cache.owners()


@pytest.mark.parametrize("slots", [2, 3, 4, 5, 7, 8, 9, 11, 15, 16])
def test_every_number_of_slots_gives_resident_tokens(
    open_llm: Callable[..., Any], prompts: list[list[int]], expected: list[tuple[int, ...]], slots: int
) -> None:
    """Six prompts at once, four running: windows, chunks and decodes mix and evict each other's experts."""
    with open_llm("offload", slots=slots, policy=("lru", "lfu-decay")[slots % 2]) as llm:
        assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == expected
        check_slots(llm)
        assert llm.running.built.cache.stats().pages_used == 0


def test_windows_change_nothing(
    open_llm: Callable[..., Any], prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Chunk by chunk, as with a window no longer than a chunk."""
    with open_llm("offload", slots=6, window_tokens=1) as llm:
        assert llm.running.built.window_tokens == 0
        assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == expected


def test_cancelled_requests_leave_the_others_alone(
    open_llm: Callable[..., Any], prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Requests come and are cancelled at random moments, windows among them; those that stay get their tokens."""
    rng = random.Random(5)
    with open_llm("offload", slots=5) as llm:
        core: EngineCore = llm.running.core
        core.limits = core.scheduler.limits = evolve(core.limits, max_gap_ms=0.001)
        tokens: dict[str, list[int]] = {}
        doomed = set()
        for turn in range(3):
            for index, prompt in enumerate(prompts):
                name = f"{turn}-{index}"
                tokens[name] = []
                core.submit(name, prompt, GREEDY)
                if rng.random() < 0.4:
                    doomed.add(name)
        while not core.idle:
            for output in core.step():
                assert output.error is None
                tokens[output.request_id] += output.tokens
            if doomed and rng.random() < 0.3:
                core.abort(doomed.pop())
        stats = core.cache.stats()
        assert stats.pages_used == 0
        check_slots(llm)
        complete = {name: got for name, got in tokens.items() if len(got) == GREEDY.max_tokens}
        assert len(complete) >= 8
        for name, got in complete.items():
            assert tuple(got) == expected[int(name.split("-")[1])], name
