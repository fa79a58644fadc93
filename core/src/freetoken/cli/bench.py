"""``freetoken bench serve URL``: measure a running server, ours or any other that speaks the OpenAI chat API."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from freetoken.plugin.commands import CommandContext
from freetoken.serve.bench.chat import ChatServer
from freetoken.serve.bench.figures import Spread
from freetoken.serve.bench.http import Address
from freetoken.serve.bench.measure import Progress as Tell
from freetoken.serve.bench.measure import measure
from freetoken.serve.bench.plan import BenchPlan
from freetoken.serve.bench.plot import check_plot, write_plot
from freetoken.serve.bench.prompts import PromptWriter
from freetoken.serve.bench.results import BenchResult
from freetoken.vocab.errors import UsageError


def bench(context: CommandContext) -> int:
    """Measure and print. The progress bar goes to standard error, results to standard output."""
    args = context.args
    if args.plot is not None:
        check_plot(args.plot)
    address = Address.parse(args.url)
    with _progress(sys.stderr) as tell:
        result = asyncio.run(_measure(args, address, tell))
    if args.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        show(result, Console(file=sys.stdout))
    if args.plot is not None:
        write_plot(result, args.plot)
    return 0


async def _measure(args: Any, address: Address, tell: Tell) -> BenchResult:
    extra = args.extra if args.plain else {"ignore_eos": True, **args.extra}
    server = await ChatServer.find(address, args.model, extra, args.api_key, args.timeout)
    writer = await PromptWriter.for_server(server, args.seed)
    plan = BenchPlan(
        lengths=args.lengths,
        repeats=args.repeats,
        decode_tokens=args.decode,
        streams=args.concurrency,
        load_prompt_tokens=args.prompt_tokens,
        requests=args.requests,
    )
    if not plan.total_requests:
        raise UsageError("bench serve", "--lengths and --decode are both 0, so nothing is left to measure")
    return await measure(server, writer, plan, tell)


@contextmanager
def _progress(out: TextIO) -> Iterator[Tell]:
    """A bar on a terminal, nothing elsewhere."""
    if not out.isatty():
        yield lambda _done, _total, _what: None
        return
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=out), transient=True) as bar:
        task = bar.add_task("connecting")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def show(result: BenchResult, console: Console) -> None:
    """Print the results as tables."""
    console.print(f"{result.model} at {result.url}")
    if result.lengths:
        console.print(_lengths_table(result))
    if result.decode is not None:
        decode = result.decode
        console.print(
            f"1 stream: {decode.tok_s:.1f} tok/s over {decode.completion_tokens} tokens after {decode.prompt_tokens}"
            f" of prompt; between tokens {_spread(decode.gap_s)} ms (p50 / p90 / p99 / max ÷ p50)"
        )
    if result.load:
        console.print(_load_table(result))
    for load in result.load:
        if load.refused:
            console.print(
                f"{load.refused} of {load.requests} requests at {load.streams} streams failed: {load.first_error}"
            )
    if result.cached_tokens:
        console.print(
            f"the prefix cache held up to {result.cached_tokens} tokens of a prompt: the chat template's share"
        )


def _lengths_table(result: BenchResult) -> Table:
    table = Table(title="time to first token by prompt length, first request and the median of the next")
    for name in ("prompt tokens", "first ms", "again ms", "first ÷ again", "prefill tok/s"):
        table.add_column(name, justify="right")
    for item in result.lengths:
        table.add_row(
            str(item.prompt_tokens),
            f"{item.first_s * 1000:.1f}",
            f"{item.again_median_s * 1000:.1f}",
            f"{item.first_over_again:.2f}",
            f"{item.prefill_tok_s:.0f}",
        )
    return table


def _load_table(result: BenchResult) -> Table:
    table = Table(title="under load: p50 / p90 / p99 / max ÷ p50")
    for name in ("streams", "requests", "out tok/s", "all tok/s", "first token ms", "between tokens ms"):
        table.add_column(name, justify="right")
    for item in result.load:
        table.add_row(
            str(item.streams),
            str(item.requests - item.refused),
            f"{item.out_tok_s:.1f}",
            f"{item.all_tok_s:.1f}",
            _spread(item.ttft_s),
            _spread(item.gap_s),
        )
    return table


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    times = " / ".join(f"{value * 1000:.1f}" for value in (spread.p50, spread.p90, spread.p99))
    return f"{times} / {spread.max_over_median:.1f}×"
