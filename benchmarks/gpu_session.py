"""An engine in this process whose insides a check can reach: its steps by hand, its logits, its declared keys."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor

from freetoken import LLM
from freetoken.ops.triton_stub import kernel_name
from freetoken.run import build
from freetoken.run.engine import Engine
from freetoken.run.graphs import DecodeGraphs
from freetoken.run.runner import ModelRunner
from freetoken.run.step_plan import SamplingRow, StepPlan, StepRow
from freetoken.vocab.batch import Batch
from freetoken.vocab.sampling import SamplingParams
from freetoken.vocab.units import ceil_div
from freetoken.warmup.launch_space import DeclaredLaunchSpace
from freetoken.warmup.survey import survey_of

EAGER = 0
"""Where ``Session.logits`` keeps those of the last step that was no replay."""


@define(eq=False)
class Session:
    """``logits`` are kept by captured size: a replay writes them where its capture did."""

    llm: LLM
    space: DeclaredLaunchSpace
    logits: dict[int, Tensor] = field(factory=dict)
    _names: int = 0

    @property
    def engine(self) -> Engine:
        engine: Engine = self.llm.running.built.engine
        return engine

    @property
    def graphs(self) -> DecodeGraphs | None:
        return self.engine._graphs

    @property
    def lanes(self) -> int:
        return int(self.llm.plan.max_running_requests)

    @property
    def vocab_size(self) -> int:
        return int(self.llm.plan.model.vocab_size)

    def declared_keys(self) -> frozenset[str]:
        return survey_of(self.space).keys

    # ------------------------------------------------------------------------------------------- steps by hand

    def name(self) -> str:
        """A request that no page table knows yet."""
        self._names += 1
        return f"check-{self._names}"

    def row(
        self, name: str, lane: int, tokens: Sequence[int], prefix: int, params: SamplingParams | None, step: int = 0
    ) -> StepRow:
        """One sequence's share of a step; every lane has pages and a state of its own."""
        plan = self.llm.plan
        each = ceil_div(plan.max_seq_tokens, plan.page_tokens)
        pages = range(1 + lane * each, 1 + (lane + 1) * each)
        have = self.llm.running.built.sizing.kv_pages
        assert pages.stop <= have, f"lane {lane} needs pages up to {pages.stop}, the cache has {have}"
        sample = None if params is None else SamplingRow(name, params, 1000 + lane, step)
        state = lane + 1 if plan.model.state_slot_bytes else 0
        return StepRow(name, lane, list(tokens), prefix, list(pages), state_slot=state, sample=sample)

    @torch.inference_mode()
    def logits_at(self, rows: Sequence[StepRow], wanted: Sequence[int]) -> Tensor | None:
        """One eager step; logits of the tokens ``wanted``, counted over the whole step."""
        engine = self.engine
        batch: Batch = engine._builder.build(StepPlan(tuple(rows)), engine._last_tokens)
        where = torch.tensor(list(wanted), dtype=torch.int64, device=batch.tokens.device)
        logits = engine.runner.run(evolve(batch, logit_rows=where))
        if where.is_cuda:
            torch.cuda.synchronize()  # the builder's few host buffers are written again by the steps that follow
        return logits

    def prefill(self, name: str, lane: int, tokens: Sequence[int], wanted: Sequence[int], chunk: int) -> Tensor | None:
        """A whole prompt in chunks; logits ``[wanted, V]`` of those positions."""
        found = []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            inside = [i - start for i in wanted if start <= i < start + len(part)]
            logits = self.logits_at([self.row(name, lane, part, start, None)], inside)
            if logits is not None:
                found.append(logits.float())
        return torch.cat(found) if found else None


@contextmanager
def open_session(directory: Path, **options: object) -> Iterator[Session]:
    """An engine on ``directory``, started as ``freetoken.LLM`` starts it."""
    spaces: list[DeclaredLaunchSpace] = []
    kept: dict[int, Tensor] = {}
    begin, forward = build.begin_warmup, ModelRunner.forward

    def begin_and_tell(*args: Any, **more: Any) -> Any:
        stage = begin(*args, **more)
        spaces.append(stage.space)
        return stage

    def forward_and_keep(self: ModelRunner, step: Any) -> Tensor:
        out = forward(self, step)
        capturing = out.is_cuda and torch.cuda.is_current_stream_capturing()
        kept[step.batch.num_tokens if capturing else EAGER] = out
        return out

    build.begin_warmup = begin_and_tell
    ModelRunner.forward = forward_and_keep  # type: ignore[method-assign]
    try:
        with LLM(str(directory), **options) as llm:  # type: ignore[arg-type]
            yield Session(llm, spaces[0], kept)
    finally:
        build.begin_warmup = begin
        ModelRunner.forward = forward  # type: ignore[method-assign]
        kept.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def device_cache_keys() -> frozenset[str]:
    """Every key that Triton holds in memory for a real device, of every kernel of this process."""
    from triton.runtime.jit import JITFunction

    found = set()
    for fn in [x for x in gc.get_objects() if issubclass(type(x), JITFunction)]:  # proxies lie about their class
        for device, cache in list(fn.device_caches.items()):
            if isinstance(device, int):  # a stub's devices are named
                found.update(f"{kernel_name(fn)}|{key}" for key in cache[0])
    return frozenset(found)
