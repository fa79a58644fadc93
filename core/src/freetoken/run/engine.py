"""Computes steps: batch, model, sampler. One object per engine; called from one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from freetoken.kv.manager import StateCopy
from freetoken.plugin.protocols import AttentionLimits
from freetoken.run.batch_builder import BatchBuilder
from freetoken.run.graphs import DecodeGraphs
from freetoken.run.layer_major import LayerMajorPass
from freetoken.run.runner import ModelRunner
from freetoken.run.sampler import Sampler, SampleResult
from freetoken.run.step_plan import StepPlan, WindowPlan
from freetoken.vocab.sampling import SamplingParams

_RING = 4  # steps whose tokens may be on their way to the host


@frozen(eq=False)
class Sampled:
    """A step's tokens on the host, in the order of ``plan.sampled``, and each one's log-probabilities or ``None``."""

    tokens: Sequence[int]
    logprobs: Sequence[object]


class LaunchedStep:
    """A step that was launched. ``tokens`` are on the host once ``arrived`` (``None`` on a CPU) has happened."""

    def __init__(self, tokens: Tensor | None, arrived: torch.cuda.Event | None, result: SampleResult | None) -> None:
        self._tokens = tokens
        self._arrived = arrived
        self._result = result

    def read(self) -> Sampled:
        """Wait for the step."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._tokens is None:
            return Sampled((), ())
        tokens = self._tokens.tolist()
        logprobs = self._result.read_logprobs() if self._result is not None else (None,) * len(tokens)
        return Sampled(tokens, logprobs)


class Window:
    """A window on its way: ``advance`` takes it through one layer, ``finish`` samples, ``close`` gives it up."""

    def __init__(self, layers: LayerMajorPass, draw: Callable[[Tensor | None], LaunchedStep]) -> None:
        self._layers = layers
        self._draw = draw

    @torch.inference_mode()
    def advance(self) -> bool:
        """One more layer; ``True`` when it was the last."""
        return self._layers.advance()

    @torch.inference_mode()
    def finish(self) -> LaunchedStep:
        """After the last layer: draw the next token where the window ends its prompt."""
        return self._draw(self._layers.logits())

    def close(self) -> None:
        self._layers.close()


class Engine:
    """``last_tokens [lanes + 1]`` holds each lane's newest token on the device, so that a next step need not wait."""

    def __init__(self, runner: ModelRunner, builder: BatchBuilder, sampler: Sampler, lanes: int, device: str) -> None:
        self._runner = runner
        self._builder = builder
        self._sampler = sampler
        self._device = torch.device(device)
        self._last_tokens = torch.zeros(lanes + 1, dtype=torch.int64, device=self._device)
        self._graphs: DecodeGraphs | None = None
        self._on_gpu = self._device.type == "cuda"
        self._hosts = (
            [torch.zeros(lanes, dtype=torch.int64, pin_memory=True) for _ in range(_RING)] if self._on_gpu else []
        )
        self._next_host = 0

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    def capture_graphs(
        self, sample: Callable[..., Tensor], limits: AttentionLimits, report: Callable[[float, str], None]
    ) -> float:
        """Capture decode steps; returns seconds. Only on a GPU, with backends that can."""
        graphs = DecodeGraphs(
            self._runner, sample, self._last_tokens, limits, self._builder.tables, self._builder.max_pages
        )
        seconds = graphs.capture(report)
        self._graphs = graphs
        return seconds

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. On a GPU this returns before it is done."""
        size = self._graphs.size_for(plan) if self._graphs is not None else None
        if self._graphs is not None and size is not None:
            return self._sent(self._graphs.replay(plan, size), None)
        if plan.copies:
            self._runner.pools.copy_state(plan.copies)
        batch = self._builder.build(plan, self._last_tokens)
        return self._drawn(plan, self._runner.run(batch))

    @torch.inference_mode()
    def open_window(self, plan: WindowPlan) -> Window:
        """Chunks of a prompt, layer by layer as the caller says."""
        if plan.copies:
            self._runner.pools.copy_state(plan.copies)
        batches = []
        for row in plan.chunks:
            batches.append(self._builder.build(StepPlan((row,)), self._last_tokens))
            if self._on_gpu:  # a window has more chunks than the ring of host buffers
                torch.cuda.current_stream().synchronize()
        return Window(LayerMajorPass(self._runner, batches), lambda logits: self._drawn(plan.final, logits))

    def _drawn(self, plan: StepPlan, logits: Tensor | None) -> LaunchedStep:
        """Sample a step's logits and start the tokens' way to the host."""
        if logits is None:
            return self._sent(None, None)
        result = self._sampler.sample(logits, [row.sample for row in plan.rows if row.sample is not None])
        self._remember(plan, result.tokens)
        return self._sent(result.tokens, result)

    def _sent(self, tokens: Tensor | None, result: SampleResult | None) -> LaunchedStep:
        """Start the tokens' way to the host."""
        if not self._on_gpu:
            return LaunchedStep(tokens, None, result)
        host = None
        if tokens is not None:
            host = self._hosts[self._next_host][: len(tokens)]
            self._next_host = (self._next_host + 1) % _RING
            host.copy_(tokens, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return LaunchedStep(host, arrived, result)

    def _remember(self, plan: StepPlan, tokens: Tensor) -> None:
        lanes = torch.tensor([row.lane for row in plan.sampled], dtype=torch.int64, pin_memory=self._on_gpu)
        self._last_tokens.index_copy_(0, lanes.to(self._device, non_blocking=True), tokens)

    @torch.inference_mode()
    def copy_state(self, copies: Sequence[StateCopy]) -> None:
        self._runner.pools.copy_state(copies)

    def admit(self, request_id: str, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._sampler.add(request_id, params, prompt, output)

    def forget(self, request_id: str) -> None:
        self._sampler.forget(request_id)
