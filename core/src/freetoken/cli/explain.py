"""``freetoken explain MODEL``: the plan for this machine, without loading a weight."""

from __future__ import annotations

import json

from freetoken.cli.model_argument import engine_start
from freetoken.config.explain import plan_json, plan_text
from freetoken.plugin.commands import CommandContext
from freetoken.serve.prepare import prepare
from freetoken.serve.start import make_plan, open_model


def explain(context: CommandContext) -> int:
    start = engine_start(context)
    prepared = prepare(start, context.plugins)
    with open_model(start, context.plugins) as checkpoint:
        plan = make_plan(start, context.plugins, checkpoint, prepared.hardware, prepared.probe).plan
    print(json.dumps(plan_json(plan), indent=2) if context.args.json else plan_text(plan))
    return 0
