"""Computes steps: batch, model, sampler. One object per engine; called from one thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from freetoken.kv.manager import StateCopy
from freetoken.run.batch_builder import BatchBuilder
from freetoken.run.runner import ModelRunner
from freetoken.run.sampler import Sampler, SampleResult
from freetoken.run.step_plan import StepPlan
from freetoken.vocab.sampling import SamplingParams


@frozen(eq=False)
class Sampled:
    """A step's tokens on the host, in the order of ``plan.sampled``, and each one's log-probabilities or ``None``."""

    tokens: Sequence[int]
    logprobs: Sequence[object]


class LaunchedStep:
    """A step that was launched; ``read`` waits for it."""

    def __init__(self, result: SampleResult | None) -> None:
        self._result = result

    def read(self) -> Sampled:
        if self._result is None:
            return Sampled((), ())
        return Sampled(self._result.tokens.tolist(), self._result.read_logprobs())


class Engine:
    """``last_tokens [lanes]`` holds each lane's newest token on the device, so that a next step need not wait."""

    def __init__(self, runner: ModelRunner, builder: BatchBuilder, sampler: Sampler, lanes: int, device: str) -> None:
        self._runner = runner
        self._builder = builder
        self._sampler = sampler
        self._device = torch.device(device)
        self._last_tokens = torch.zeros(lanes, dtype=torch.int64, device=self._device)

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. On a GPU this returns before it is done."""
        if plan.copies:
            self._runner.pools.copy_state(plan.copies)
        batch = self._builder.build(plan, self._last_tokens)
        logits = self._runner.run(batch)
        if logits is None:
            return LaunchedStep(None)
        result = self._sampler.sample(logits, [row.sample for row in plan.rows if row.sample is not None])
        self._remember(plan, result.tokens)
        return LaunchedStep(result)

    def _remember(self, plan: StepPlan, tokens: Tensor) -> None:
        lanes = torch.tensor([row.lane for row in plan.sampled], dtype=torch.int64)
        self._last_tokens.index_copy_(0, lanes.to(self._device, non_blocking=True), tokens)

    @torch.inference_mode()
    def copy_state(self, copies: Sequence[StateCopy]) -> None:
        self._runner.pools.copy_state(copies)

    def admit(self, request_id: str, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._sampler.add(request_id, params, prompt, output)

    def forget(self, request_id: str) -> None:
        self._sampler.forget(request_id)
