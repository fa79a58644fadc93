"""Captured decode steps: one CUDA graph a batch size, with embedding, layers, head and sampler inside."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from freetoken.plugin.protocols import AttentionLimits, BatchPlan, Step
from freetoken.run.batch_builder import PageTables
from freetoken.run.decode_inputs import DecodeInputs
from freetoken.run.graph_sizes import captured_size, graph_sizes
from freetoken.run.runner import ModelRunner
from freetoken.run.step_plan import StepPlan

_log = logging.getLogger("freetoken.graphs")


@define(eq=False)
class _Captured:
    """One size: its graph, what it reads, and the tokens it leaves."""

    inputs: DecodeInputs
    graph: torch.cuda.CUDAGraph
    plans: dict[str, BatchPlan]
    tokens: Tensor
    next_tokens: Tensor


@define(eq=False)
class DecodeGraphs:
    """Captures and replays. ``last_tokens [lanes + 1]``: the last entry is the scratch lane of padded rows."""

    runner: ModelRunner
    sample: Callable[..., Tensor]
    last_tokens: Tensor
    limits: AttentionLimits
    tables: PageTables
    max_pages: int
    _captured: dict[int, _Captured] = field(factory=dict)
    _sizes: tuple[int, ...] = ()

    @torch.inference_mode()
    def capture(self, report: Callable[[float, str], None]) -> float:
        """Capture every size, the largest first so that one memory pool serves all; returns seconds."""
        start = time.perf_counter()
        sizes = graph_sizes(self.limits.max_running_requests)
        for backend in self.runner.attention.values():
            backend.reserve_graph(self.limits)
        pool = torch.cuda.graph_pool_handle()
        for index, size in enumerate(reversed(sizes)):
            report(index / len(sizes), f"decode graph of {size}")
            self._captured[size] = self._capture(size, pool)
        self._sizes = sizes
        seconds = time.perf_counter() - start
        _log.info("captured %d decode graphs (to %d sequences) in %.2f s", len(sizes), sizes[-1], seconds)
        return seconds

    def _capture(self, size: int, pool: Any) -> _Captured:
        device = self.last_tokens.device
        inputs = DecodeInputs(size, self.max_pages, self.limits.page_tokens, len(self.last_tokens) - 1, device)
        inputs.fill((), self.tables)
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        batch = inputs.batch(tokens, (0,) * size)
        plans = {name: backend.plan_capture(batch) for name, backend in self.runner.attention.items()}
        step = Step(batch, plans, self.runner.pools.layers)
        moe = self.runner.moe
        if moe is not None:
            moe.begin_step(batch)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), nullcontext() if moe is None else moe.rehearse():
            # Once outside the capture: a first launch loads modules and makes workspaces, which a capture forbids.
            self._body(inputs, step, tokens)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            next_tokens = self._body(inputs, step, tokens)
        if moe is not None:
            moe.end_step()
        return _Captured(inputs, graph, plans, tokens, next_tokens)

    def _body(self, inputs: DecodeInputs, step: Step, tokens: Tensor) -> Tensor:
        """What is captured: resolve pending tokens, one decode step, draw, remember."""
        lanes = inputs.column("lanes")
        known, newest = inputs.column("tokens"), self.last_tokens.index_select(0, lanes)
        tokens.copy_(torch.where(inputs.column("pending") != 0, newest, known))
        logits = self.runner.forward(step)
        drawn = self.sample(
            logits, inputs.column("temperature"), inputs.column("top_k"), inputs.column("top_p"),
            inputs.column("min_p"), inputs.column("seeds"), inputs.column("steps"),
        )  # fmt: skip
        self.last_tokens.index_copy_(0, lanes, drawn)
        return drawn

    def size_for(self, plan: StepPlan) -> int | None:
        """The captured size that can run ``plan``: all rows decode, on the sampler's fast route."""
        rows = plan.rows
        if plan.copies or not all(_is_plain_decode(row.tokens, row.prefix_tokens) for row in rows):
            return None
        if not all(row.sample is not None and row.sample.params.route == "fast" for row in rows):
            return None
        return captured_size(self._sizes, len(rows))

    def replay(self, plan: StepPlan, size: int) -> Tensor:
        """Launch ``plan`` in the graph of ``size``: tokens ``[rows] i64`` in a buffer the next replay overwrites."""
        captured = self._captured[size]
        prefixes = captured.inputs.fill(plan.rows, self.tables)
        batch = captured.inputs.batch(captured.tokens, prefixes)
        moe = self.runner.moe
        if moe is not None:
            moe.begin_step(batch)
        for name, backend in self.runner.attention.items():
            backend.plan_replay(captured.plans[name], batch)
        captured.graph.replay()
        if moe is not None:
            moe.end_step()
        return captured.next_tokens[: len(plan.rows)]

    def release(self) -> None:
        """Drop all graphs and what they reserved."""
        self._captured.clear()
        self._sizes = ()
        for backend in self.runner.attention.values():
            backend.release_graph()


def _is_plain_decode(tokens: Sequence[int], prefix_tokens: int) -> bool:
    return len(tokens) == 1 and prefix_tokens > 0
