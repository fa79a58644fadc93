"""From a plan to an engine, as a list of named stages. Read it as the table of contents of a start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import evolve, frozen

from freetoken.config.facts import WeightNeeds
from freetoken.config.limits import Limits
from freetoken.config.resolve import Resolved, moe_setup
from freetoken.kv.manager import CacheManager
from freetoken.kv.pool import CachePools
from freetoken.memory.measure import device_free_bytes
from freetoken.memory.sizing import size_after_measure
from freetoken.memory.threads import compute_threads
from freetoken.ops.table import OpTable
from freetoken.plugin.catalog import Catalogs
from freetoken.plugin.protocols import (
    AttentionBackend,
    AttentionLimits,
    AttentionSetup,
    LoadedKernel,
    Model,
    ModelParts,
    MoEStrategy,
)
from freetoken.run.batch_builder import BatchBuilder
from freetoken.run.engine import Engine
from freetoken.run.loader import WeightPacker, load_kernels
from freetoken.run.runner import ModelRunner
from freetoken.run.sampler import Sampler
from freetoken.run.scratch import ScratchForward
from freetoken.run.warmup import WarmupOutcome, cpu_actions, run_steps
from freetoken.vocab.errors import EngineError
from freetoken.vocab.ops import OpShape
from freetoken.vocab.plan import Plan, Sizing
from freetoken.vocab.warmup import Known
from freetoken.vocab.weight import StoredTensor
from freetoken.warmup.launch_space import DeclaredLaunchSpace, build_launch_space
from freetoken.weights.checkpoint import Checkpoint
from freetoken.weights.stream import load_weights

Report = Callable[[str, float, str], None]
"""Progress of a start: phase, fraction within it, detail."""

OptionsOf = Callable[[type | None], object]


@frozen(eq=False)
class BuiltEngine:
    """A ready engine with what its scheduler needs to know."""

    engine: Engine
    plan: Plan
    sizing: Sizing
    cache: CacheManager
    moe: MoEStrategy | None
    warmup: WarmupOutcome

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
) -> BuiltEngine:
    """Load, size and assemble. Raises ``CheckpointError`` for files that do not hold what the plan needs."""
    plan = resolved.plan
    num_threads = compute_threads(plan.hardware.cores, threads, device_kind=plan.device.kind)
    if plan.device.kind == "cpu":
        torch.set_num_threads(num_threads)
    attention = create_attention(plan, catalogs, options_of)
    kernels = load_kernels(resolved.kernels, plan.device, plan.dtype, lambda t: _dequantise(checkpoint, t), num_threads)
    moe = create_moe(resolved, catalogs, kernels, options_of)
    weights = _load(resolved, checkpoint, kernels, moe, report)
    model = assemble(resolved, weights, kernels, attention, moe)
    report("sizing", 0.0, "")
    sizing = _size(plan)
    pools, cache = create_caches(plan, sizing, prefix_cache)
    runner = ModelRunner(model, attention, moe, pools)
    builder = BatchBuilder(
        torch.device(plan.device.torch_name),
        plan.max_running_requests,
        plan.max_seq_tokens,
        plan.step_space.tokens.high,
        plan.page_tokens,
    )
    sampler = Sampler(plan.model.vocab_size, plan.device.torch_name, kernels[_sample_shape(resolved)].call)
    engine = Engine(runner, builder, sampler, plan.max_running_requests, plan.device.torch_name)
    warmup = warm_up(resolved, catalogs, options_of, ScratchForward(runner, sampler, (), sizing.page_tokens), report)
    if warmup.max_tokens is not None and warmup.max_tokens < sizing.max_prefill_tokens:
        sizing = sizing.shrunk("a warmup step ran out of memory", max_prefill_tokens=max(warmup.max_tokens, 1))
    return BuiltEngine(engine, plan, sizing, cache, moe, warmup)


def create_attention(plan: Plan, catalogs: Catalogs, options_of: OptionsOf) -> dict[str, AttentionBackend]:
    """One backend object a group."""
    limits = AttentionLimits(plan.page_tokens, plan.max_seq_tokens, plan.max_running_requests, plan.max_prefill_tokens)
    backends = {}
    for group, choice in zip(plan.model.attention, plan.attention, strict=True):
        spec = catalogs.attention_backends.get(choice.name)
        setup = AttentionSetup(group, plan.device, plan.dtype, limits, options_of(spec.options))
        backends[group.name] = spec.create(setup)
    return backends


def create_moe(
    resolved: Resolved, catalogs: Catalogs, kernels: Mapping[OpShape, LoadedKernel], options_of: OptionsOf
) -> MoEStrategy | None:
    """The planned strategy with each layer's bound expert kernel; ``None`` for a dense model."""
    plan, needs = resolved.plan, resolved.needs
    if plan.model.moe is None:
        return None
    spec = catalogs.moe_strategies.get(plan.moe.name)
    limits = Limits(plan.max_seq_tokens, plan.max_running_requests, plan.max_prefill_tokens, ())
    declared = sum(c.worst_bytes for c in plan.claims if c.owner == spec.name)
    setup = moe_setup(
        plan.model, needs, resolved.kernels, limits, plan.device, plan.dtype, declared or plan.memory_bytes,
        plan.hardware.host_free_bytes,
    )  # fmt: skip
    shapes = _expert_shapes(needs)
    layers = tuple(evolve(layer, call=kernels[shapes[layer.layer]].call) for layer in setup.layers)
    return spec.create(evolve(setup, layers=layers, options=options_of(spec.options)))


def _expert_shapes(needs: WeightNeeds) -> dict[int, OpShape]:
    return {s.layer: needs.shapes[s.name] for s in needs.slots if s.kind == "experts" and s.layer is not None}


def _dequantise(checkpoint: Checkpoint, tensor: StoredTensor) -> torch.Tensor:
    return checkpoint.codec(tensor.format).dequantise(tensor)


def _load(
    resolved: Resolved,
    checkpoint: Checkpoint,
    kernels: Mapping[OpShape, LoadedKernel],
    moe: MoEStrategy | None,
    report: Report,
) -> dict[str, Any]:
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
    )
    return packer.finish()


def assemble(
    resolved: Resolved,
    weights: Mapping[str, Any],
    kernels: Mapping[OpShape, LoadedKernel],
    attention: Mapping[str, AttentionBackend],
    moe: MoEStrategy | None,
) -> Model:
    """The family's layers around the packed weights and the bound kernels."""
    plan = resolved.plan
    parts = ModelParts(weights, OpTable(kernels), attention, moe, plan.device, plan.dtype)
    return resolved.family.build(plan.model, parts)


def _size(plan: Plan) -> Sizing:
    """The second decision: what is really free now may shrink the cache."""
    return size_after_measure(plan, device_free_bytes(plan.device))


def create_caches(plan: Plan, sizing: Sizing, prefix_cache: bool) -> tuple[CachePools, CacheManager]:
    """The pools and their manager; recurrent rows are one scratch row, the running ones, then snapshots."""
    cache = CacheManager(
        num_pages=sizing.kv_pages,
        page_tokens=sizing.page_tokens,
        prefix_cache=prefix_cache,
        state_slots=sizing.state_slots,
        snapshot_slots=sizing.snapshot_slots,
    )
    pools = CachePools(
        plan.model.caches, sizing.kv_pages, sizing.page_tokens, cache.num_state_rows, plan.device.torch_name
    )
    return pools, cache


def warm_up(
    resolved: Resolved, catalogs: Catalogs, options_of: OptionsOf, scratch: ScratchForward, report: Report
) -> WarmupOutcome:
    """Run the planned policy's steps, one layer of each kind."""
    plan = resolved.plan
    spec = catalogs.warmup_policies.get(plan.warmup.name)
    policy = spec.create(options_of(spec.options))
    space = plan_launch_space(resolved)
    scratch = scratch.with_layers(kind_layers(space))
    report("warmup", 0.0, spec.name)
    steps = policy.steps(plan, space, Known())
    return run_steps(spec.name, steps, cpu_actions(scratch), lambda part, detail: report("warmup", part, detail))


def plan_launch_space(resolved: Resolved) -> DeclaredLaunchSpace:
    """What every part of the planned model can launch."""
    plan = resolved.plan
    parts = [
        (name, tuple((shape, resolved.kernels[shape].launches) for shape in shapes if shape in resolved.kernels))
        for name, shapes in resolved.needs.parts
    ]
    return build_launch_space(plan.step_space, parts, plan.device)


def kind_layers(space: DeclaredLaunchSpace) -> tuple[int, ...]:
    """One layer of each kind: the first, by index."""
    found = [kind.partition(".")[2] for kind in space.kinds if kind.startswith("layers.")]
    return tuple(int(index) for index in found)


def _sample_shape(resolved: Resolved) -> OpShape:
    for shape in resolved.kernels:
        if shape.op == "sample":
            return shape
    raise EngineError(f"family {resolved.family.name}", "its op_shapes list no sample op")
