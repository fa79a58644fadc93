"""Makes the parts that a plan names: attention backends, the MoE strategy, pools and their manager."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from attrs import evolve

from freetoken.config.facts import WeightNeeds
from freetoken.config.limits import Limits
from freetoken.config.resolve import Resolved, moe_setup
from freetoken.kv.manager import CacheManager
from freetoken.kv.pool import CachePools
from freetoken.plugin.catalog import Catalogs
from freetoken.plugin.protocols import (
    AttentionBackend,
    AttentionLimits,
    AttentionSetup,
    LoadedKernel,
    MoESetup,
    MoEStrategy,
)
from freetoken.plugin.specs import MoEStrategySpec
from freetoken.run.loader import OptionsOf
from freetoken.vocab.ops import OpShape
from freetoken.vocab.plan import Plan, Sizing


def create_attention(plan: Plan, catalogs: Catalogs, options_of: OptionsOf) -> dict[str, AttentionBackend]:
    """One backend object a group."""
    backends = {}
    for group, choice in zip(plan.model.attention, plan.attention, strict=True):
        spec = catalogs.attention_backends.get(choice.name)
        setup = AttentionSetup(group, plan.device, plan.dtype, attention_limits(plan), options_of(spec.options))
        backends[group.name] = spec.create(setup)
    return backends


def attention_limits(plan: Plan) -> AttentionLimits:
    """The largest step the plan's attention will be asked for."""
    return AttentionLimits(plan.page_tokens, plan.max_seq_tokens, plan.max_running_requests, plan.max_prefill_tokens)


def create_moe(
    resolved: Resolved, catalogs: Catalogs, kernels: Mapping[OpShape, LoadedKernel], options_of: OptionsOf,
    cache_dir: Path | None = None,
) -> MoEStrategy | None:  # fmt: skip
    """The planned strategy with each layer's bound expert kernel; ``None`` for a dense model. It may keep notes on the
    model in ``cache_dir``."""
    planned = planned_moe(resolved, catalogs, options_of)
    if planned is None:
        return None
    spec, setup = planned
    shapes = _expert_shapes(resolved.needs)
    layers = tuple(evolve(layer, call=kernels[shapes[layer.layer]].call) for layer in setup.layers)
    notes = None if cache_dir is None else notes_path(cache_dir, resolved.plan)
    return spec.create(evolve(setup, layers=layers, notes=notes))


def notes_path(cache_dir: Path, plan: Plan) -> Path:
    """The strategy's own file for this model: by name for people, by place so that two of one name are told apart."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in plan.served_name)
    digest = sha256(str(Path(plan.model_path).resolve()).encode()).hexdigest()[:12]
    return cache_dir / f"moe-{plan.moe.name}" / f"{plain}-{digest}.json"


def planned_moe(
    resolved: Resolved, catalogs: Catalogs, options_of: OptionsOf
) -> tuple[MoEStrategySpec, MoESetup] | None:
    """The planned strategy and what it is made from, without kernels; ``None`` for a dense model."""
    plan = resolved.plan
    if plan.model.moe is None:
        return None
    spec = catalogs.moe_strategies.get(plan.moe.name)
    limits = Limits(plan.max_seq_tokens, plan.max_running_requests, plan.max_prefill_tokens, ())
    declared = sum(c.worst_bytes for c in plan.claims if c.owner == spec.name and c.where == "device")
    setup = moe_setup(
        plan.model, resolved.needs, resolved.kernels, limits, plan.device, plan.dtype, declared or plan.memory_bytes,
        plan.hardware.host_free_bytes,
    )  # fmt: skip
    return spec, evolve(setup, options=options_of(spec.options))


def window_tokens(resolved: Resolved, catalogs: Catalogs, moe: MoEStrategy | None) -> int:
    """How much of a prompt passes a layer before the next; 0: prompts are computed chunk by chunk."""
    if moe is None or not catalogs.moe_strategies.get(resolved.plan.moe.name).layer_major:
        return 0
    return int(getattr(moe, "window_tokens", 0))


def _expert_shapes(needs: WeightNeeds) -> dict[int, OpShape]:
    return {s.layer: needs.shapes[s.name] for s in needs.slots if s.kind == "experts" and s.layer is not None}


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


def graphs_refusal(resolved: Resolved, catalogs: Catalogs, moe: MoEStrategy | None) -> str | None:
    """Why decode steps cannot be captured, now that the weights are in; ``None`` when they can."""
    plan = resolved.plan
    if plan.device.kind != "cuda":
        return f"there are no graphs on a {plan.device.kind}"
    for choice in plan.attention:
        if not catalogs.attention_backends.get(choice.name).graphs:
            return f"attention backend {choice.name} cannot be captured"
    if plan.model.moe is not None and not catalogs.moe_strategies.get(plan.moe.name).graphs:
        return f"MoE strategy {plan.moe.name} cannot be captured"
    if not getattr(moe, "capturable", True):
        return f"MoE strategy {plan.moe.name} needs the host in some layers"
    return None
