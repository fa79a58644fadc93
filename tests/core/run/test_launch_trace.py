"""What a planned model launches is what its launch space declares.

Oracle: a trace. The real step (batch builder, runner, family, kernels, attention, sampler) runs on meta tensors whose
offsets are those of a GPU's buffers, and every launch is recorded with its key and grid. Token counts are thinned here;
``benchmarks/trace_launches.py`` takes every one from 1 to 8192.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("freetoken_kernels_triton")
pytest.importorskip("freetoken_attention_triton")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import trace_launches

from freetoken.plugin.protocols import AttentionLimits
from freetoken.run.batch_builder import PageTables
from freetoken.run.graph_sizes import graph_sizes
from freetoken.run.graphs import DecodeGraphs
from freetoken.testing.launch_trace import LaunchTrace, Share
from freetoken.testing.launches import DEVICES
from freetoken.vocab.launch import StepPoint
from freetoken.warmup.survey import survey_of


@pytest.fixture(scope="module", params=trace_launches.MODELS)
def trace(request: pytest.FixtureRequest) -> LaunchTrace:
    return trace_launches.make_trace(request.param)


@pytest.mark.slow
def test_every_step_launches_what_is_declared_and_every_declared_key_is_launched(trace: LaunchTrace) -> None:
    """Recorded = declared at each step, part by part; and over all steps no declared key is left out."""
    found = trace_launches.walk(trace, trace_launches.thinned())
    assert not found.differences, "\n".join(found.differences)
    assert trace_launches.never_met(trace, found) == frozenset()


def test_all_kernels_of_the_model_are_traced(trace: LaunchTrace) -> None:
    """By hand: the embedding's gather is a declared library call, so nothing may be opaque or unrecorded."""
    assert trace.space.opaque == ()
    assert any(use.name.startswith("embedding ") for use in survey_of(trace.space).libraries)
    recorded = trace.record((Share(40), Share(1, 3)))
    assert set(recorded) == {"embed", "head", *(f"layers.{i}" for i in range(trace.plan.model.num_layers))}
    assert not recorded["embed"]
    assert all(made for part, made in recorded.items() if part != "embed")


def test_a_step_without_logits_launches_no_head(trace: LaunchTrace) -> None:
    assert "head" not in trace.record((Share(40, 0, None),))


@pytest.mark.parametrize("card", sorted(set(DEVICES) - {"h200"}))
@pytest.mark.parametrize("model", trace_launches.MODELS)
def test_other_cards_too(model: str, card: str) -> None:
    """Tiles and splits follow the card, at the call site as in the declaration."""
    found = trace_launches.walk(trace_launches.make_trace(model, card), (1, 2, 16, 17, 63, 65, 700, 8192))
    assert not found.differences, "\n".join(found.differences)


class _Stream:
    """What a capture asks of a stream and of a graph, without a device."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass


def test_captured_decode_steps_launch_what_decode_steps_declare(
    trace: LaunchTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every captured size, through the real capture with torch's streams and graphs replaced; at any context."""
    for name, stand_in in {
        "Stream": _Stream, "CUDAGraph": _Stream, "current_stream": _Stream, "synchronize": lambda: None,
        "stream": lambda _: nullcontext(), "graph": lambda *_, **__: nullcontext(), "graph_pool_handle": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    plan = trace.plan
    running, pages = plan.max_running_requests, plan.max_seq_tokens // plan.page_tokens
    limits = AttentionLimits(plan.page_tokens, plan.max_seq_tokens, running, plan.max_prefill_tokens)
    last_tokens = torch.zeros(running + 1, dtype=torch.int64, device="meta")
    graphs = DecodeGraphs(trace.runner, trace.sample, last_tokens, limits, PageTables(running, pages), pages)
    whole: list[Any] = []
    recorded = trace.record_body(lambda: whole.append(graphs.capture(lambda *_: None)))
    assert whole, "the capture ran"
    for size in graph_sizes(running):
        for context in (2, plan.max_seq_tokens):
            point = StepPoint(size, size, 1, context, size, decode=True)
            for part, made in recorded.items():
                assert trace.declared(part, point) <= made, f"{part} of {size} sequences at a context of {context}"
    declared: dict[str, set[Any]] = {part: set() for part in recorded}
    for size in graph_sizes(running):
        point = StepPoint(size, size, 1, plan.max_seq_tokens, size, decode=True)
        for part in declared:
            declared[part] |= trace.declared(part, point)
    assert recorded == declared
