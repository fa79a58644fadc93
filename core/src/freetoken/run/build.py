"""From a plan to an engine, as a list of named stages. Read it as the table of contents of a start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from freetoken.config.resolve import Resolved
from freetoken.kv.manager import CacheManager
from freetoken.memory.allocator import LATER_BYTES, hold_allocator, is_capped
from freetoken.memory.measure import device_free_bytes
from freetoken.memory.sizing import size_after_measure
from freetoken.memory.threads import compute_threads, loading_threads
from freetoken.ops.table import OpTable
from freetoken.plugin.catalog import Catalogs
from freetoken.plugin.protocols import LoadedKernel, ModelParts, MoEStrategy
from freetoken.run.batch_builder import BatchBuilder
from freetoken.run.create import (
    attention_limits,
    create_attention,
    create_caches,
    create_moe,
    graphs_refusal,
    window_tokens,
)
from freetoken.run.engine import Engine
from freetoken.run.loader import OptionsOf, WeightPacker, load_kernels
from freetoken.run.peak import measure_peak, take_step_memory
from freetoken.run.runner import ModelRunner
from freetoken.run.sampler import Sampler
from freetoken.run.scratch import ScratchForward
from freetoken.run.warmup import WarmupOutcome
from freetoken.run.warmup_memory import WarmupMemory
from freetoken.run.warmup_space import kind_layers
from freetoken.run.warmup_stage import begin_warmup
from freetoken.vocab.errors import EngineError
from freetoken.vocab.ops import OpShape
from freetoken.vocab.plan import Plan, Sizing
from freetoken.vocab.weight import StoredTensor
from freetoken.weights.checkpoint import Checkpoint
from freetoken.weights.stream import load_weights

Report = Callable[[str, float, str], None]
"""Progress of a start: phase, fraction within it, detail."""


@frozen(eq=False)
class BuiltEngine:
    """A ready engine with what its scheduler needs to know."""

    engine: Engine
    plan: Plan
    sizing: Sizing
    cache: CacheManager
    moe: MoEStrategy | None
    warmup: WarmupOutcome
    window_tokens: int = 0

    @property
    def max_context_tokens(self) -> int:
        """The longest request: the plan's, or what the sized cache holds (one page is scratch)."""
        return min(self.plan.max_seq_tokens, (self.sizing.kv_pages - 1) * self.sizing.page_tokens)


def build_engine(
    resolved: Resolved,
    checkpoint: Checkpoint,
    catalogs: Catalogs,
    options_of: OptionsOf,
    report: Report,
    *,
    threads: int | None,
    prefix_cache: bool,
    cuda_graphs: bool = True,
    memory: WarmupMemory | None = None,
) -> BuiltEngine:
    """Load, size, assemble, capture and warm. Raises ``CheckpointError`` for files without what the plan needs."""
    plan, device = resolved.plan, resolved.plan.device.torch_name
    num_threads = compute_threads(plan.hardware.cores, threads, device_kind=plan.device.kind)
    warming = begin_warmup(resolved, catalogs, options_of, report, memory)  # compiles beside the weights
    layers = kind_layers(warming.space)
    attention = create_attention(plan, catalogs, options_of)
    kernels = load_kernels(
        resolved.kernels, plan.device, plan.dtype, lambda t: _dequantise(checkpoint, t), num_threads, options_of
    )
    moe = create_moe(resolved, catalogs, kernels, options_of, None if memory is None else memory.cache_dir)
    loaders = loading_threads(num_threads, plan.device.kind)
    if plan.device.kind == "cpu":
        torch.set_num_threads(1)  # of each loader's operators
    try:
        weights = _load(resolved, checkpoint, kernels, moe, report, loaders)
    finally:
        if plan.device.kind == "cpu":
            torch.set_num_threads(num_threads)
    parts = ModelParts(weights, OpTable(kernels), attention, moe, plan.device, plan.dtype)
    model = resolved.family.build(plan.model, parts)
    sample = kernels[_sample_shape(resolved)].call
    sampler = Sampler(plan.model.vocab_size, device, sample)
    warming.load()  # modules take device memory: before what is left is measured
    report("sizing", 0.0, "")
    peak_bytes = measure_peak(plan, model, attention, moe, sampler, layers)
    later = LATER_BYTES if is_capped(plan) else 0
    free = device_free_bytes(plan.device)
    sizing = size_after_measure(plan, free, step_peak_bytes=peak_bytes, reserve_bytes=later)
    hold_allocator(plan)
    pools, cache = create_caches(plan, sizing, prefix_cache)
    runner = ModelRunner(model, attention, moe, pools)
    engine = Engine(runner, _batch_builder(plan), sampler, plan.max_running_requests, device)

    def capture() -> None:
        if cuda_graphs and graphs_refusal(resolved, catalogs, moe) is None:
            engine.capture_graphs(sample, attention_limits(plan), lambda part, detail: report("graphs", part, detail))

    scratch = ScratchForward(runner, sampler, layers, sizing.page_tokens)
    warmup = warming.finish(scratch, capture)
    if warmup.max_tokens is not None and warmup.max_tokens < sizing.max_prefill_tokens:
        sizing = sizing.shrunk("a warmup step ran out of memory", max_prefill_tokens=max(warmup.max_tokens, 1))
    window = take_step_memory(plan, sizing, scratch, window_tokens(resolved, catalogs, moe))
    return BuiltEngine(engine, plan, sizing, cache, moe, warmup, window)


def _dequantise(checkpoint: Checkpoint, tensor: StoredTensor) -> torch.Tensor:
    return checkpoint.codec(tensor.format).dequantise(tensor)


def _load(
    resolved: Resolved,
    checkpoint: Checkpoint,
    kernels: Mapping[OpShape, LoadedKernel],
    moe: MoEStrategy | None,
    report: Report,
    workers: int,
) -> dict[str, Any]:
    """Stream the weights through the kernels' packing."""
    plan = resolved.plan
    packer = WeightPacker(
        shapes=resolved.needs.shapes,
        specs=resolved.kernels,
        loaded=kernels,
        dequantise=lambda t: _dequantise(checkpoint, t),
        device=torch.device(plan.device.torch_name),
        dtype=getattr(torch, plan.dtype),
        moe=moe,
    )
    report("weights", 0.0, plan.model_path)
    load_weights(
        checkpoint,
        resolved.needs.slots,
        packer.deliver,
        dtype=plan.dtype,
        device=plan.device.torch_name,
        ignored=resolved.family.ignored_tensors,
        report=lambda fraction, detail: report("weights", fraction, detail),
        workers=workers,
    )
    return packer.finish()


def _batch_builder(plan: Plan) -> BatchBuilder:
    return BatchBuilder(
        torch.device(plan.device.torch_name),
        plan.max_running_requests,
        plan.max_seq_tokens,
        plan.step_space.tokens.high,
        plan.page_tokens,
    )


def _sample_shape(resolved: Resolved) -> OpShape:
    for shape in resolved.kernels:
        if shape.op == "sample":
            return shape
    raise EngineError(f"family {resolved.family.name}", "its op_shapes list no sample op")
