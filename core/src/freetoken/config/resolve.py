"""Turns options, a checkpoint and a machine into a plan, or refuses with numbers. Pure: nothing is allocated here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from attrs import evolve, frozen

from freetoken.config.choices import Chooser, Prober, Surroundings, kernel_overrides, pick
from freetoken.config.engine_options import CoreOptions
from freetoken.config.facts import CheckpointFacts, WeightNeeds, find_family, weight_needs
from freetoken.config.limits import Limits, decide_kv_tokens, decide_limits, round_up
from freetoken.config.weight_memory import activation_claim, packed_weights_claim
from freetoken.memory.allocator import CAPPED, LATER_BYTES
from freetoken.memory.broker import DEVICE, claims_on, needed_bytes
from freetoken.memory.threads import compute_threads, loading_threads
from freetoken.plugin.catalog import Catalogs
from freetoken.plugin.protocols import AttentionLimits, AttentionSetup, ExpertLayer, MoESetup
from freetoken.plugin.specs import AttentionBackendSpec, KernelSpec, ModelFamilySpec, MoEStrategySpec
from freetoken.vocab.availability import Availability
from freetoken.vocab.errors import FreeTokenError, RefusedPlan
from freetoken.vocab.hardware import Device, Hardware
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.model_spec import ModelSpec
from freetoken.vocab.ops import OPS, OpShape
from freetoken.vocab.plan import Choice, Decision, KernelChoice, OptionValue, Plan, Refusal
from freetoken.vocab.units import MIB, format_bytes
from freetoken.weights.slots import check_slots

RUNTIME_BYTES = 300 * MIB  # interpreter, libraries and, on a GPU, the context's own share
CONTEXT_BYTES = 640 * MIB  # room for a context with the libraries' modules on a large card; sizing measures what it is
DEFAULT_SNAPSHOTS = 16


@frozen
class Inputs:
    """Everything a plan depends on. ``options_of`` gives the instance of a plugin's option class, or ``None``."""

    options: CoreOptions
    facts: CheckpointFacts
    hardware: Hardware
    catalogs: Catalogs
    choose: Chooser
    probe: Prober
    options_of: Callable[[type | None], object]
    option_values: tuple[OptionValue, ...] = ()


@frozen
class Resolved:
    """A plan with the values it was made from that building needs again and that are not plain data."""

    plan: Plan
    family: ModelFamilySpec
    needs: WeightNeeds
    kernels: Mapping[OpShape, KernelSpec]


def resolve(inputs: Inputs) -> Resolved | Refusal:
    """The plan, or why there is none. Every decision carries its reason."""
    try:
        return _resolve(inputs)
    except FreeTokenError as error:
        return error.refusal


def _resolve(inputs: Inputs) -> Resolved:
    options, facts = inputs.options, inputs.facts
    device, why_device = decide_device(options, inputs.hardware)
    dtype = decide_dtype(options, device, facts)
    around = Surroundings(inputs.catalogs, inputs.hardware, device, inputs.choose, inputs.probe)
    family = find_family(inputs.catalogs.model_families, facts)
    spec = family.read_config(facts.config, dtype.value)
    needs = weight_needs(family, spec, facts, dtype.value)
    formats = inputs.catalogs.weight_formats.names()
    check_slots(facts.index, needs.slots, ignored=family.ignored_tensors, formats=formats)
    limits = decide_limits(options, spec, device)

    attention, page = _choose_attention(around, inputs, spec, dtype.value)
    kernels, kernel_choices = _choose_kernels(around, options, needs)
    _, warmup = pick(around, inputs.catalogs.warmup_policies, options.warmup_policy, "", lambda _: Availability.yes())

    budget = decide_memory(options, device)
    claims = _dense_claims(inputs, spec, needs, kernels, limits, attention, page, device, dtype.value)
    left = budget.value - needed_bytes(claims_on(claims, DEVICE, device))
    _refuse_if_negative(left, claims, device, budget, facts)
    slots, snapshot_bytes, state_claim = _state(options, spec, limits)
    left -= state_claim.steady_bytes
    moe, moe_claims = _choose_moe(around, inputs, spec, needs, kernels, limits, page, dtype.value, left)
    left -= needed_bytes(claims_on(moe_claims, DEVICE, device))
    _refuse_if_negative(left, (*claims, *moe_claims, state_claim), device, budget, facts)
    kv = decide_kv_tokens(options, spec, limits, page, device, left)
    kv_claim = MemoryClaim("kv", f"{kv.value} tokens of K and V", kv.value * spec.kv_token_bytes)
    plan = Plan(
        model=spec,
        model_path=facts.path,
        served_name=options.served_model_name or facts.short_name,
        hardware=inputs.hardware,
        device=device,
        dtype=dtype.value,
        attention=tuple(choice for _, choice, _ in attention),
        moe=moe,
        kernels=kernel_choices,
        warmup=warmup,
        page_tokens=page,
        max_seq_tokens=limits.max_seq_tokens,
        max_running_requests=limits.max_running_requests,
        max_prefill_tokens=limits.max_prefill_tokens,
        kv_tokens=kv.value,
        state_slots=slots,
        snapshot_bytes=snapshot_bytes,
        memory_bytes=budget.value,
        claims=(*claims, *moe_claims, *((state_claim,) if slots else ()), kv_claim),
        decisions=(why_device, dtype, *limits.decisions, budget, kv),
        options=inputs.option_values,
    )
    return Resolved(plan, family, needs, kernels)


def decide_device(options: CoreOptions, hardware: Hardware) -> tuple[Device, Decision[str]]:
    """The device to compute on; ``RefusedPlan`` when the one asked for is not there."""
    if options.device == "auto":
        device = hardware.device("cuda") or hardware.cpu
        why = "an accelerator is there" if device.kind != "cpu" else "no accelerator was found"
        return device, Decision("device", device.torch_name, why)
    found = hardware.device(options.device)
    if found is None:
        raise RefusedPlan(
            f"--device {options.device}", hardware.accelerator_problem or "this machine has none",
            hardware.accelerator_fix or "use --device cpu",
        )  # fmt: skip
    return found, Decision("device", found.torch_name, "asked for")


def decide_dtype(options: CoreOptions, device: Device, facts: CheckpointFacts) -> Decision[str]:
    """The compute dtype: on a CPU float32, since bfloat16 products there do not get faster with more rows."""
    if options.dtype != "auto":
        return Decision("dtype", options.dtype, "asked for")
    if device.kind == "cpu":
        return Decision("dtype", "float32", "fastest on a CPU, and exact")
    if facts.dtype in ("bfloat16", "float16"):
        return Decision("dtype", facts.dtype, "the checkpoint's")
    return Decision("dtype", "bfloat16", "half the bytes of float32 at the same range")


def decide_memory(options: CoreOptions, device: Device) -> Decision[int]:
    """How many bytes of the device FreeToken may take."""
    free = device.memory_free_bytes
    allowed = int(free * options.memory_ratio)
    if options.device_memory_bytes is not None and options.device_memory_bytes < allowed:
        return Decision("memory_bytes", options.device_memory_bytes, CAPPED)
    return Decision("memory_bytes", allowed, f"--memory-ratio {options.memory_ratio:g} of {format_bytes(free)} free")


def runtime_claim(device: Device, capped: bool) -> MemoryClaim:
    """What the process takes beside tensors. Exceeding a share of what is free does no harm, a cap would be broken: so
    under one all that is ever taken outside torch's allocator is counted."""
    if device.kind == "cpu" or not capped:
        return MemoryClaim("runtime", "interpreter and libraries", RUNTIME_BYTES)
    what = "the context, libraries' modules, captured steps"
    return MemoryClaim("runtime", what, CONTEXT_BYTES + LATER_BYTES)


def _choose_attention(
    around: Surroundings, inputs: Inputs, spec: ModelSpec, dtype: str
) -> tuple[list[tuple[AttentionBackendSpec, Choice, int]], int]:
    """A backend a group, and the page size that all of them take."""
    picked = []
    for index, group in enumerate(spec.attention):
        backend, choice = pick(
            around, inputs.catalogs.attention_backends, inputs.options.attention_backend, group.name,
            lambda s, g=group: s.serves(g, dtype),  # type: ignore[misc]
        )  # fmt: skip
        picked.append((backend, choice, index))
    page = inputs.options.page_tokens
    for backend, _, _ in picked:
        if backend.page_tokens and page not in backend.page_tokens:
            page = backend.page_tokens[0]
    return picked, page


def _choose_kernels(
    around: Surroundings, options: CoreOptions, needs: WeightNeeds
) -> tuple[dict[OpShape, KernelSpec], tuple[KernelChoice, ...]]:
    """One kernel a shape; each distinct shape is decided once."""
    overrides = kernel_overrides(options.kernel)
    shapes = list(needs.shapes.values()) + [s for _, part in needs.parts for s in part]
    _refuse_idle(overrides, {shape.op for shape in shapes})
    kernels: dict[OpShape, KernelSpec] = {}
    choices = []
    for shape in dict.fromkeys(shapes):
        if OPS[shape.op].weights and not shape.formats:
            continue  # listed by the family, but no slot of this checkpoint has it
        offers = around.catalogs.kernels.ranked(lambda k, op=shape.op: k.op == op)  # type: ignore[misc]
        spec, choice = pick(
            around, around.catalogs.kernels, overrides.get(shape.op, "auto"), shape.op,
            lambda k, s=shape: k.serves(s), offers=offers,  # type: ignore[misc]
        )  # fmt: skip
        kernels[shape] = spec
        choices.append(KernelChoice(shape, choice))
    return kernels, tuple(choices)


def _refuse_idle(overrides: Mapping[str, str], ops: Set[str]) -> None:
    """An override that would change nothing is a mistake that its writer should hear of."""
    for op, name in overrides.items():
        if op not in ops:
            raise RefusedPlan(
                f"--kernel {op}={name}", f"this model never computes {op}", f"its ops are {', '.join(sorted(ops))}"
            )


def _attention_setup(inputs: Inputs, spec: ModelSpec, limits: Limits, page: int, device: Device, dtype: str,
                     backend: AttentionBackendSpec, index: int) -> AttentionSetup:  # fmt: skip
    bounds = AttentionLimits(page, limits.max_seq_tokens, limits.max_running_requests, limits.max_prefill_tokens)
    return AttentionSetup(spec.attention[index], device, dtype, bounds, inputs.options_of(backend.options))


def _dense_claims(
    inputs: Inputs, spec: ModelSpec, needs: WeightNeeds, kernels: Mapping[OpShape, KernelSpec], limits: Limits,
    attention: list[tuple[AttentionBackendSpec, Choice, int]], page: int, device: Device, dtype: str,
) -> tuple[MemoryClaim, ...]:  # fmt: skip
    claims = [runtime_claim(device, inputs.options.device_memory_bytes is not None)]
    compute = compute_threads(inputs.hardware.cores, inputs.options.threads, device_kind=device.kind)
    claims.append(packed_weights_claim(needs, kernels, dtype, loading_threads(compute, device.kind)))
    for backend, _, index in attention:
        claims += backend.workspace(_attention_setup(inputs, spec, limits, page, device, dtype, backend, index))
    claims.append(activation_claim(spec, needs, limits.max_prefill_tokens, limits.max_running_requests, dtype))
    return tuple(claims)


def moe_setup(
    spec: ModelSpec, needs: WeightNeeds, kernels: Mapping[OpShape, KernelSpec], limits: Limits, device: Device,
    dtype: str, memory_bytes: int, host_bytes: int,
) -> MoESetup:  # fmt: skip
    """What a strategy is budgeted from: each layer's layout as its kernel would pack an expert."""
    assert spec.moe is not None
    by_layer = {s.layer: needs.shapes[s.name] for s in needs.slots if s.kind == "experts"}
    layers = []
    for layer in spec.moe.layers:
        kernel = kernels[by_layer[layer]]
        if kernel.bank_layout is None:
            raise RefusedPlan(f"--kernel experts={kernel.name}", "it declares no bank layout")
        layers.append(ExpertLayer(layer, kernel.bank_layout(by_layer[layer])))
    return MoESetup(
        spec.moe, tuple(layers), device, dtype, limits.max_prefill_tokens, limits.max_running_requests, memory_bytes,
        host_bytes, max_seq_tokens=limits.max_seq_tokens,
    )  # fmt: skip


def _choose_moe(
    around: Surroundings, inputs: Inputs, spec: ModelSpec, needs: WeightNeeds,
    kernels: Mapping[OpShape, KernelSpec], limits: Limits, page: int, dtype: str, left_bytes: int,
) -> tuple[Choice, tuple[MemoryClaim, ...]]:  # fmt: skip
    """The strategy and what it takes beside KV for one request, or for as many tokens as were asked for.

    A dense model accepts any installed strategy and uses none.
    """
    catalog, asked = inputs.catalogs.moe_strategies, inputs.options.moe_strategy
    if spec.moe is None:
        if asked != "auto":
            catalog.get(asked)
        return Choice(catalog.kind.word, "", asked, "unused: no experts"), ()
    kv_tokens = round_up(inputs.options.kv_tokens or limits.max_seq_tokens, page) + page  # page 0 is scratch
    room = left_bytes - kv_tokens * spec.kv_token_bytes
    host_bytes = room if around.device.kind == "cpu" else around.hardware.host_free_bytes  # one memory on a CPU
    setup = moe_setup(spec, needs, kernels, limits, around.device, dtype, room, host_bytes)

    def budget(strategy: MoEStrategySpec) -> tuple[MemoryClaim, ...]:
        return strategy.budget(evolve(setup, options=inputs.options_of(strategy.options)))

    def fits(strategy: MoEStrategySpec) -> Availability:
        try:
            claims = budget(strategy)
        except FreeTokenError as error:
            return Availability.no(f"{error.refusal.asked}: {error.refusal.found}", error.refusal.fix)
        device_bytes = needed_bytes(claims_on(claims, DEVICE, around.device))
        if device_bytes > setup.memory_bytes:
            return Availability.no(
                f"its experts need {format_bytes(device_bytes)}, {format_bytes(max(setup.memory_bytes, 0))} are left"
                f" beside KV for {kv_tokens} tokens",
                "use --moe-strategy offload (pip install freetoken-moe-offload), or lower --max-seq-len",
            )
        return Availability.yes()

    strategy, choice = pick(around, catalog, asked, "", fits)
    return choice, tuple(c for c in budget(strategy))


def _state(options: CoreOptions, spec: ModelSpec, limits: Limits) -> tuple[int, int, MemoryClaim]:
    """Rows of the recurrent pools: one scratch, one a running request; and the snapshots' budget in bytes."""
    if not spec.state_slot_bytes:
        return 0, 0, MemoryClaim("state", "no recurrent layers", 0)
    rows = limits.max_running_requests + 1
    budget = options.snapshot_bytes
    snapshots = DEFAULT_SNAPSHOTS if budget is None else budget // spec.state_slot_bytes
    snapshots = snapshots if options.prefix_cache else 0
    snapshot_bytes = snapshots * spec.state_slot_bytes
    claim = MemoryClaim(
        "state", f"{rows} running and {snapshots} kept recurrent states",
        rows * spec.state_slot_bytes + snapshot_bytes,
    )  # fmt: skip
    return limits.max_running_requests, snapshot_bytes, claim


def _refuse_if_negative(
    left: int, claims: tuple[MemoryClaim, ...], device: Device, budget: Decision[int], facts: CheckpointFacts
) -> None:
    if left >= 0:
        return
    counted = claims_on(claims, DEVICE, device)
    listed = ", ".join(f"{c.owner} {format_bytes(c.worst_bytes)}" for c in counted if c.worst_bytes)
    total = needed_bytes(counted)
    raise RefusedPlan(
        f"{facts.path} on this machine",
        f"it would take {format_bytes(total)} ({listed}); allowed are {format_bytes(budget.value)} ({budget.because})",
        "lower --max-prefill-tokens or --max-running-requests, raise --memory-ratio, or use a smaller dtype or model",
    )
