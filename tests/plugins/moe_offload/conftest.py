"""Tiny checkpoints with experts, engines over them, and strategies made directly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken import LLM, SamplingParams
from freetoken.builtin.kernels_torch import expert_layout
from freetoken.models import qwen3_moe, qwen3_next
from freetoken.ops.experts import experts as reference_experts
from freetoken.plugin.protocols import ExpertLayer, MoESetup
from freetoken.testing.checkpoints import write_tiny
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import MoEShape
from freetoken.vocab.ops import OpShape
from freetoken_moe_offload.options import OffloadOptions
from freetoken_moe_offload.strategy import OffloadExperts

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CHUNK = 16


@pytest.fixture(scope="session", params=["qwen3_moe", "qwen3_next"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: two expert layers of attention, or four of which three are recurrent; 8 experts, 2 chosen."""
    family = {"qwen3_moe": qwen3_moe, "qwen3_next": qwen3_next}[request.param].FAMILY
    return write_tiny(family, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.fixture(scope="session")
def open_llm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[LLM]]:
    """``open_llm(strategy, **options)``: an engine over the checkpoint; chunks of 16 tokens, windows of 128."""

    def open_it(strategy: str, **options: Any) -> LLM:
        given = {"moe-offload": {"window_tokens": 128, **options}} if strategy == "offload" else {}
        return LLM(
            str(checkpoint), dtype="float32", device="cpu", threads=1, moe_strategy=strategy, max_seq_len=256,
            max_prefill_tokens=CHUNK, max_running_requests=4, warmup_policy="none", plugin_options=given,
            cache_dir=str(tmp_path_factory.mktemp("cache")),  # no notes on which experts others used
        )  # fmt: skip

    return open_it


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """From one token to two windows."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 200, (n,), generator=generator).tolist() for n in (100, 3, 40, 150, 17, 1)]


@pytest.fixture(scope="session")
def expected(open_llm: Callable[..., Any], prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The tokens of ``resident``, each prompt alone."""
    with open_llm("resident") as llm:
        return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]


Filled = Callable[..., OffloadExperts]


@pytest.fixture(scope="session")
def setup_of() -> Callable[..., MoESetup]:
    """``setup_of(layers, experts, top_k, memory=…, **options)``: experts of 384 bytes on a CPU."""
    return _setup


@pytest.fixture(scope="session")
def filled() -> Filled:
    """``filled(layers, experts, top_k, slots=…, policy=…)``: a sealed strategy on random experts."""

    def make(layers: int, experts: int, top_k: int, **options: Any) -> OffloadExperts:
        strategy = OffloadExperts(_setup(layers, experts, top_k, **options))
        generator = torch.Generator().manual_seed(0)
        for layer in range(layers):
            for expert in range(experts):
                parts = {"gate_up": (8, 8), "down": (8, 4)}
                strategy.accept(
                    layer, expert, {name: torch.randn(shape, generator=generator) for name, shape in parts.items()}
                )
        strategy.seal()
        return strategy

    return make


def _setup(layers: int, experts: int, top_k: int, memory: int = 1 << 30, **options: Any) -> MoESetup:
    shape = MoEShape(tuple(range(layers)), experts, top_k, hidden=8, intermediate=4)
    layout = expert_layout(OpShape("experts", "float32", cols=8, intermediate=4))
    every = tuple(ExpertLayer(layer, layout, reference_experts) for layer in range(layers))
    return MoESetup(
        shape, every, Device(), "float32", 64, 4, memory, 1 << 30, OffloadOptions(**options), max_seq_tokens=4096
    )
