"""``freetoken explain MODEL``: the plan for this machine, without loading a weight."""

from __future__ import annotations

import json

from freetoken.cli.model_argument import engine_start
from freetoken.config.explain import plan_json, plan_text
from freetoken.memory.hardware import probe_hardware
from freetoken.plugin.commands import CommandContext
from freetoken.serve.start import make_plan, open_model


def explain(context: CommandContext) -> int:
    start = engine_start(context)
    options = start.options
    hardware = probe_hardware(accelerators=options.device != "cpu", host_memory_bytes=options.host_memory_bytes)
    with open_model(start, context.plugins) as checkpoint:
        plan = make_plan(start, context.plugins, checkpoint, hardware).plan
    print(json.dumps(plan_json(plan), indent=2) if context.args.json else plan_text(plan))
    return 0
