"""``freetoken warmup``: plan it, compile it where no GPU is, verify that it was enough, report what it took."""

from __future__ import annotations

import json
from pathlib import Path

from attrs import evolve

from freetoken.cli.model_argument import engine_start
from freetoken.plugin.commands import CommandContext
from freetoken.plugin.options import CORE_OWNER
from freetoken.serve.start import EngineStart
from freetoken.vocab.errors import UsageError
from freetoken.vocab.hardware import Device
from freetoken.warmup.targets import describe_target, parse_target


def warmup(context: CommandContext) -> int:
    """Run one action; returns the exit code."""
    action = context.args.action
    if action == "report":
        from freetoken.cli.warmup_report import report

        return report(context)
    if action == "verify":
        from freetoken.cli.warmup_verify import verify

        return verify(context)
    return _plan(context) if action == "plan" else _compile(context)


def _target(context: CommandContext) -> Device | None:
    return None if context.args.target is None else parse_target(context.args.target)


def start_for(context: CommandContext, target: Device | None) -> EngineStart:
    """The start that is asked about; a target is a CUDA device whatever this machine has."""
    start = engine_start(context)
    if target is None:
        return start
    settings = start.settings.with_value(CORE_OWNER, "device", "cuda", "--target")
    return evolve(start, settings=settings)


def _plan(context: CommandContext) -> int:
    from freetoken.cli.warmup_text import plan_json, plan_text
    from freetoken.serve.warmup_plan import work_out

    target = _target(context)
    found = work_out(start_for(context, target), context.plugins, target)
    print(json.dumps(plan_json(found), indent=1) if context.args.json else plan_text(found))
    return 0


def _compile(context: CommandContext) -> int:
    """Every key that the policy would compile, and no more, whatever a manifest says."""
    from freetoken.run.warmup_compile import compile_into
    from freetoken.serve.warmup_plan import work_out
    from freetoken.warmup.manifest import default_cache_dir

    target = _target(context)
    start = start_for(context, target)
    found = work_out(start, context.plugins, target, use_manifest=False)
    device = found.plan.device
    if device.kind == "cpu":
        raise UsageError(
            "freetoken warmup compile", "there is nothing to compile for a CPU",
            "name a card with --target h200 or --target cuda:90,sms=132",
        )  # fmt: skip
    folder = _output(context, default_cache_dir(start.options.cache_dir), device)
    done = compile_into(folder, found.space, found.steps)
    if context.args.json:
        print(json.dumps(done.to_json(), indent=1))
    else:
        print(f"for {describe_target(device)}: {done}\n")
        print(f"serve with it:  TRITON_CACHE_DIR={folder} freetoken serve …   (the folder may be moved before that)")
    return 1 if done.report.errors else 0


def _output(context: CommandContext, cache_dir: Path, device: Device) -> Path:
    if context.args.output is not None:
        return Path(context.args.output).expanduser().resolve()
    return cache_dir / f"triton-{device.kind}-{device.arch}"
