"""How many bytes cross, counted. Oracle: the experts that the router chose, noted where the strategy is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from freetoken import LLM, SamplingParams
from freetoken.schedule.engine_core import EngineCore
from freetoken.vocab.launch import StepPoint

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@contextmanager
def noted(strategy: Any) -> Iterator[set[tuple[int, int]]]:
    """Inside, every (layer, expert) that a step is routed to is put into the set."""
    seen: set[tuple[int, int]] = set()
    start = strategy.start

    def noting(layer: int, hidden: Any, weights: Any, experts: torch.Tensor) -> Any:
        seen.update((layer, expert) for expert in experts.unique().tolist())
        return start(layer, hidden, weights, experts)

    strategy.start = noting
    yield seen
    del strategy.start


def expert_bytes(strategy: Any) -> int:
    return int(strategy._caches[0].group.expert_bytes)


def prompt_bytes(strategy: Any) -> int:
    """What crossed for prompts, when it was asked for and before."""
    moved = strategy.stats().moved_bytes
    return int(moved["prefill"] + moved["hint"])


def prompt(tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    made: list[int] = torch.randint(0, 200, (tokens,), generator=generator).tolist()
    return made


def window_bytes(llm: LLM, tokens: list[int]) -> tuple[int, int, int]:
    """Bytes that the first window of a prompt moves, bytes of the experts it is routed to, and its chunks."""
    core: EngineCore = llm.running.core
    strategy = llm.running.built.moe
    core.submit("long", tokens, ONE)
    with noted(strategy) as seen:
        while core.scheduler.window is None:
            core.step()
        assert not seen, "something was computed before the window"
        before = prompt_bytes(strategy)
        chunks = len(core._window.plan.chunks)  # type: ignore[union-attr]
        while core.scheduler.window is not None:
            core.step()
        moved = prompt_bytes(strategy) - before
        wanted = len(seen) * expert_bytes(strategy)
    while not core.idle:
        core.step()
    return moved, wanted, chunks


@pytest.mark.parametrize("slots", [8, 9, 12, 15, 20])
def test_a_window_of_eight_chunks_moves_each_expert_at_most_once(open_llm: Callable[..., Any], slots: int) -> None:
    """From as many slots as a layer has experts: ≤ 1.05 × the experts it routes to. Three prompts in turn."""
    with open_llm("offload", slots=slots) as llm:
        for seed in range(3):
            moved, wanted, chunks = window_bytes(llm, prompt(129, seed))
            assert chunks == 8
            assert moved <= 1.05 * wanted
            assert moved or slots >= llm.running.built.moe._caches[0].group.all_experts


def test_chunk_by_chunk_moves_more(open_llm: Callable[..., Any]) -> None:
    """The other half of the claim: without windows the same prompt moves its experts again for every chunk."""
    with open_llm("offload", slots=8, window_tokens=1) as llm:
        strategy = llm.running.built.moe
        with noted(strategy) as seen:
            llm.generate([prompt(128, 0)], ONE)
        assert strategy.stats().moved_bytes["prefill"] > 3 * len(seen) * expert_bytes(strategy)


def test_a_short_prompt_moves_only_what_it_routes_to(open_llm: Callable[..., Any]) -> None:
    """One token, three and a chunk: at most their experts, and nothing for the experts in slots already."""
    with open_llm("offload", slots=9) as llm:
        strategy = llm.running.built.moe
        for tokens in (1, 3, 16):
            before = sum(strategy.stats().moved_bytes.values())
            with noted(strategy) as seen:
                llm.generate([prompt(tokens, tokens)], ONE)
            moved = sum(strategy.stats().moved_bytes.values()) - before
            assert moved <= len(seen) * expert_bytes(strategy)


def test_experts_in_slots_do_not_move(open_llm: Callable[..., Any]) -> None:
    """With a slot for every expert all of them are there from the start: nothing moves but the fill."""
    with open_llm("offload", slots=1000) as llm:
        llm.generate([prompt(100, 1), prompt(5, 2)], ONE)
        stats = llm.running.built.moe.stats()
        assert stats.moved_bytes == {"fill": stats.moved_bytes["fill"], "decode": 0, "prefill": 0, "hint": 0}
        assert stats.misses == 0
        assert stats.hits > 0


def test_warmup_moves_nothing(open_llm: Callable[..., Any]) -> None:
    """Oracle: the counters, after forwards at several points as a warmup policy would ask for them, and a window."""
    from freetoken.run.scratch import ScratchForward

    with open_llm("offload", slots=5) as llm:
        built = llm.running.built
        before = built.moe.stats()
        layers = range(len(built.engine.runner.model.layers))
        scratch = ScratchForward(built.engine.runner, built.engine._sampler, layers, built.sizing.page_tokens)
        for tokens in (1, 2, 16):
            scratch.run(StepPoint(tokens, 1, tokens, tokens + 3, 1, decode=tokens == 1))
        scratch.run_window(16, 8)
        assert built.moe.stats() == before
