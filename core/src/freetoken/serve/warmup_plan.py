"""A model's warmup worked out without loading it: the plan, its launch space, and the policy's steps."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve, frozen

from freetoken.config.choices import Prober
from freetoken.memory.hardware import probe_hardware
from freetoken.plugin.manager import Plugins
from freetoken.plugin.options import CORE_OWNER
from freetoken.run.warmup_memory import WarmupMemory
from freetoken.run.warmup_space import plan_launch_space
from freetoken.serve.engine_start import warmup_memory
from freetoken.serve.prepare import prepare, shallow_probe
from freetoken.serve.start import EngineStart, make_plan, open_model, options_by_class
from freetoken.vocab.hardware import Device, Hardware
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Known, WarmupStep
from freetoken.warmup.launch_space import DeclaredLaunchSpace


@frozen(eq=False)
class WorkedOut:
    """What a start would warm, and what is known of it here."""

    plan: Plan
    space: DeclaredLaunchSpace
    known: Known
    steps: tuple[WarmupStep, ...]
    memory: WarmupMemory


def work_out(start: EngineStart, plugins: Plugins, target: Device | None, *, use_manifest: bool = True) -> WorkedOut:
    """The steps for this machine, or for ``target``, of which no manifest can be here. Raises as a start would."""
    start = without_weights(start)
    hardware, probe = _machine(start, plugins, target)
    with open_model(start, plugins) as checkpoint:
        resolved = make_plan(start, plugins, checkpoint, hardware, probe)
    options_of = options_by_class(start.settings, plugins)
    space = plan_launch_space(resolved, plugins.catalogs, options_of)
    memory = warmup_memory(start.options, plugins)
    known = memory.recall(resolved.plan, space)
    if not use_manifest or target is not None:
        known = Known(because="planned for another machine" if target is not None else "asked to start anew")
    spec = plugins.catalogs.warmup_policies.get(resolved.plan.warmup.name)
    policy = spec.create(options_of(spec.options))
    return WorkedOut(resolved.plan, space, known, tuple(policy.steps(resolved.plan, space, known)), memory)


def _machine(start: EngineStart, plugins: Plugins, target: Device | None) -> tuple[Hardware, Prober]:
    """This machine with its deep probes, or its host with ``target`` in it, of which only facts can be asked."""
    if target is None:
        prepared = prepare(start, plugins)
        return prepared.hardware, prepared.probe
    host = probe_hardware(accelerators=False, host_memory_bytes=start.options.host_memory_bytes)
    hardware = evolve(host, accelerators=(target,))
    return hardware, shallow_probe(hardware)


def without_weights(start: EngineStart) -> EngineStart:
    """A folder that holds a configuration and no weights is planned with plain ones in the compute dtype."""
    path = start.model_path
    if start.options.load_format == "dummy" or not _only_configuration(path):
        return start
    settings = start.settings.with_value(CORE_OWNER, "load_format", "dummy", f"no weights in {path.name}")
    return evolve(start, settings=settings)


def _only_configuration(path: Path) -> bool:
    return path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors"))
