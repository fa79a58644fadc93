"""``freetoken generate MODEL PROMPT``: one answer on standard output, as it comes."""

from __future__ import annotations

import json
import sys
from typing import Any

from attrs import evolve

from freetoken.plugin.commands import CommandContext
from freetoken.plugin.options import CORE_OWNER
from freetoken.serve.llm import LLM
from freetoken.vocab.sampling import SamplingParams


def generate(context: CommandContext) -> int:
    """The prompt goes through the chat template where the model has one, unless ``--raw``."""
    args = context.args
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with LLM(args.model_argument, report=_report, plugins=_words(context), **_options(context)) as llm:
        params = _params(llm.default_params(), args)
        if args.json:
            answer = (
                llm.generate([prompt], params)[0]
                if args.raw
                else llm.chat([{"role": "user", "content": prompt}], params)
            )
            print(json.dumps({"text": answer.text, "finish": answer.finish, "tokens": list(answer.token_ids)}))
            return 0
        pieces = llm.stream(prompt, params) if args.raw else llm.stream_chat(_message(prompt), params)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    return 0


def _message(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _params(defaults: SamplingParams, args: Any) -> SamplingParams:
    params = evolve(defaults, max_tokens=args.max_tokens, seed=args.seed)
    return params if args.temperature is None else evolve(params, temperature=args.temperature)


def _words(context: CommandContext) -> tuple[str, ...]:
    selection = context.plugins.selection
    return (*sorted(selection.required), *(f"no:{name}" for name in sorted(selection.blocked)))


def _options(context: CommandContext) -> dict[str, Any]:
    values = context.settings.values
    core = {name: v.value for (owner, name), v in values.items() if owner == CORE_OWNER and name != "model"}
    others: dict[str, dict[str, object]] = {}
    for (owner, name), v in values.items():
        if owner != CORE_OWNER and v.origin != "default":
            others.setdefault(owner, {})[name] = v.value
    return {**core, "plugin_options": others}


def _report(phase: str, fraction: float, detail: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{phase} {fraction:.0%} {detail[:60]}", end="\r", file=sys.stderr, flush=True)
