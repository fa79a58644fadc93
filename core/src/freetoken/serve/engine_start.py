"""Starts an engine in this process: plugins, plan, build. Shared by the worker process and by ``LLM``."""

from __future__ import annotations

import logging
from collections.abc import Callable

from attrs import frozen

from freetoken.config.engine_options import CoreOptions
from freetoken.config.explain import broken_candidates, choices_summary
from freetoken.plugin.manager import Plugins
from freetoken.run.build import BuiltEngine, build_engine
from freetoken.run.warmup_memory import WarmupMemory
from freetoken.schedule.engine_core import EngineCore
from freetoken.schedule.late import LateSteps
from freetoken.schedule.scheduler import SchedulerLimits
from freetoken.serve.prepare import Prepared
from freetoken.serve.start import EngineStart, make_plan, open_model, options_by_class
from freetoken.serve.text.generation_defaults import GenerationDefaults
from freetoken.vocab.plan import Plan, Sizing
from freetoken.warmup.manifest import default_cache_dir
from freetoken.warmup.watch import LateWatch

Report = Callable[[str, float, str], None]


@frozen(eq=False)
class RunningEngine:
    """An engine that serves: its core, what it was built as, and the plugins to tell when it stops."""

    core: EngineCore
    built: BuiltEngine
    plugins: Plugins
    fingerprint: str = ""

    @property
    def plan(self) -> Plan:
        return self.built.plan

    @property
    def sizing(self) -> Sizing:
        return self.built.sizing

    def close(self) -> None:
        self.core.late.watch.disarm()
        try:
            if (close := getattr(self.built.moe, "close", None)) is not None:
                close()
        finally:
            self.plugins.shutdown(self.plan)


_log = logging.getLogger("freetoken.engine")


def log_choices(plan: Plan) -> None:
    """One line on what runs, and a warning for everything that should have run but is broken."""
    _log.info("plan: %s", choices_summary(plan))
    for text in broken_candidates(plan):
        _log.warning("passed over: %s", text)


def start_engine(start: EngineStart, report: Report, prepared: Prepared) -> RunningEngine:
    """Every stage of a start, in order. Raises ``UsageError``, ``RefusedPlan`` or ``CheckpointError``."""
    loaded, options = prepared.plugins, start.options
    report("planning", 0.0, str(start.model_path))
    memory = warmup_memory(options, loaded)
    with open_model(start, loaded) as checkpoint:
        resolved = make_plan(start, loaded, checkpoint, prepared.hardware, prepared.probe)
        log_choices(resolved.plan)
        loaded.plan_resolved(resolved.plan)
        built = build_engine(
            resolved,
            checkpoint,
            loaded.catalogs,
            options_by_class(start.settings, loaded),
            report,
            threads=options.threads,
            prefix_cache=options.prefix_cache,
            cuda_graphs=options.cuda_graphs,
            memory=memory,
        )
        eos = GenerationDefaults.from_config(checkpoint.generation_config).eos_token_ids
    core = EngineCore(
        engine=built.engine,
        cache=built.cache,
        limits=SchedulerLimits(
            max_running=built.sizing.max_running_requests,
            max_step_tokens=max(built.sizing.max_prefill_tokens, built.sizing.max_running_requests),
            max_context_tokens=built.max_context_tokens,
            max_gap_ms=float(options.max_token_gap_ms),
            page_tokens=built.sizing.page_tokens,
            max_window_tokens=built.window_tokens,
        ),
        eos_ids=frozenset(built.plan.model.eos_token_ids) | frozenset(eos),
        vocab_size=built.plan.model.vocab_size,
        overlap=built.plan.device.kind != "cpu",
        late=LateSteps(LateWatch(options.on_late_compile), lambda step: memory.late(step.point, step.words)),
    )
    loaded.ready(built.plan, built.sizing)
    core.late.watch.arm(with_triton=built.plan.device.kind != "cpu")
    return RunningEngine(core, built, loaded, memory.fingerprint.digest if memory.fingerprint is not None else "")


def warmup_memory(options: CoreOptions, plugins: Plugins) -> WarmupMemory:
    """Where warmups are remembered, and the plugins that a manifest rests on."""
    active = {r.name: (r.version, r.origin) for r in plugins.records.values() if r.state == "active" and not r.builtin}
    return WarmupMemory(default_cache_dir(options.cache_dir), active)
