"""The arguments of ``freetoken bench``. Light: it is imported whenever the command line is built."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from freetoken.serve.bench.plan import BenchPlan


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    plan = BenchPlan()
    parser.add_argument("what", choices=("serve",), help="what to measure: serve, a running server")
    parser.add_argument("url", metavar="URL", help="its address, for example http://127.0.0.1:1919")
    parser.add_argument("--model", metavar="NAME", help="the model to ask for; default: the only one it lists")
    parser.add_argument(
        "--lengths", type=_numbers, default=plan.lengths, metavar="N,N,…",
        help=f"prompt lengths in tokens, first and again; 0 for none (default: {_listed(plan.lengths)})",
    )  # fmt: skip
    parser.add_argument(
        "--decode", type=_count, default=plan.decode_tokens, metavar="N",
        help=f"tokens of an answer; 0 measures no decoding (default: {plan.decode_tokens})",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=_numbers, default=plan.streams, metavar="N,N,…",
        help=f"numbers of streams at a time; 0 for none (default: {_listed(plan.streams)})",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", type=_count, default=plan.load_prompt_tokens, metavar="N",
        help=f"prompt of each stream (default: {plan.load_prompt_tokens})",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=_count, default=0, metavar="N", help="requests at each concurrency (default: two a stream)"
    )
    parser.add_argument(
        "--repeats", type=_positive, default=plan.repeats, metavar="N",
        help=f"further requests at each length, and runs of one stream (default: {plan.repeats})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON for scripts instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results (.png, .svg or .pdf)")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument("--extra", type=_object, default={}, metavar="JSON", help="fields to add to every request")
    parser.add_argument(
        "--plain", action="store_true", help="send only OpenAI's own fields: without ignore_eos answers may end early"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the prompts' salt (default: a new one every time)")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for one request (default: 900)")


def _numbers(text: str) -> tuple[int, ...]:
    """``"1,16,64"``; ``"0"`` is none."""
    values = tuple(_count(word) for word in text.split(",") if word.strip())
    if len(values) > 1 and 0 in values:
        raise argparse.ArgumentTypeError(f"{text!r}: 0 stands alone, for none")
    return tuple(value for value in values if value)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return value


def _positive(text: str) -> int:
    value = _count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return value


def _object(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is JSON, but no object")
    return value


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
