"""The built-in commands, added through the hook that strangers use. A command is a file, imported when it runs."""

from __future__ import annotations

import argparse

from freetoken.plugin.commands import Command, CommandContext, CommandGroup
from freetoken.plugin.markers import hookimpl


@hookimpl(tryfirst=True)
def freetoken_add_commands(commands: CommandGroup) -> None:
    commands.add(Command("serve", "Serve a model over an OpenAI-compatible HTTP API", _none, _serve, True))
    commands.add(Command("generate", "Complete one prompt on the command line", _generate_arguments, _generate, True))
    commands.add(
        Command("explain", "Print the plan for a model: each choice and why", _explain_arguments, _explain, True)
    )
    commands.add(Command("warmup", "Plan, compile, verify or report the warmup", _warmup_arguments, _warmup, True))
    commands.add(Command("plugins", "List plugins, their state and what they offer", _plugins_arguments, _plugins))
    commands.add(Command("bench", "Measure a running server from outside", _bench_arguments, _bench))
    commands.add(Command("models", "List model families, weight formats and installed models", _json_argument, _models))


def _none(parser: argparse.ArgumentParser) -> None:
    """``serve`` takes options only."""


def _json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", metavar="MODEL", help="what --model takes")
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    parser.add_argument(
        "--temperature", type=float, default=None, metavar="X", help="0 is greedy; default: the model's"
    )
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="makes sampling repeatable")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    _json_argument(parser)


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="what --model takes")
    _json_argument(parser)


def _plugins_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also the built-in ones, and run the slow probes")
    _json_argument(parser)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from freetoken.cli.bench_arguments import configure

    configure(parser)


def _warmup_arguments(parser: argparse.ArgumentParser) -> None:
    from freetoken.cli.warmup_arguments import configure

    configure(parser)


def _warmup(context: CommandContext) -> int:
    from freetoken.cli.warmup import warmup

    return warmup(context)


def _serve(context: CommandContext) -> int:
    from freetoken.cli.serve import serve

    return serve(context)


def _generate(context: CommandContext) -> int:
    from freetoken.cli.generate import generate

    return generate(context)


def _explain(context: CommandContext) -> int:
    from freetoken.cli.explain import explain

    return explain(context)


def _plugins(context: CommandContext) -> int:
    from freetoken.cli.plugins import plugins

    return plugins(context)


def _models(context: CommandContext) -> int:
    from freetoken.cli.models import models

    return models(context)


def _bench(context: CommandContext) -> int:
    from freetoken.cli.bench import bench

    return bench(context)
