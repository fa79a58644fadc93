"""What the loop costs beside the model: the engine process a step, the HTTP process a token.

    python benchmarks/loop.py [--streams 32] [--tokens 400] [--json] [--profile] [--only engine|http]

The model is a null one (``null_engine.py``); scheduler, cache manager, batch builder, sampler state, pipe, uvicorn and
clients are the real ones. Run it on an idle machine and, for the figures in docs/benchmarks.md, on two cores:
``taskset -c 0,1 python benchmarks/loop.py``. CPU seconds are more to be trusted than the wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from attrs import asdict, define, field, frozen
from null_engine import NullStart, null_core, null_http, null_running
from rich.console import Console
from rich.table import Table

from freetoken.serve.bench.chat import ChatServer, Exchange
from freetoken.serve.bench.figures import Spread, median, percentile
from freetoken.serve.bench.http import Address
from freetoken.serve.worker_loop import WorkerLoop
from freetoken.vocab.sampling import SamplingParams

PROMPT_TOKENS = 200
SPAWN = multiprocessing.get_context("spawn")


@frozen
class EngineCost:
    """The engine process at ``streams`` running requests, in milliseconds a step.

    Medians of wall time: ``step_ms`` is the whole, ``launch_ms`` (batch and sampler rows), ``send_ms`` (pickle and
    pipe) and ``plan_ms`` (plan and commit) its parts. ``cpu_ms`` is the thread's CPU time over all the steps.
    """

    streams: int
    steps: int
    step_ms: float
    p99_ms: float
    plan_ms: float
    launch_ms: float
    send_ms: float
    cpu_ms: float


@frozen
class HttpCost:
    """The HTTP process serving ``streams`` event streams.

    ``cpu_us_per_token`` is the difference of two runs that differ in tokens alone, so that what a request costs is in
    ``cpu_ms_per_request``. ``extra_gap_ms`` is the median time between a client's tokens beyond the model's own
    ``model_ms``. ``most_tok_s`` is the whole chain's rate with a model that takes no time.
    """

    streams: int
    tokens: int
    model_ms: float
    cpu_us_per_token: float
    cpu_ms_per_request: float
    extra_gap_ms: float
    p99_gap_ms: float
    most_tok_s: float


# ------------------------------------------------------------------------------------------- engine process


@define
class _Clock:
    """Calls a function and keeps how long each call took."""

    call: Callable[..., Any]
    seconds: list[float] = field(factory=list)

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        result = self.call(*args)
        self.seconds.append(time.perf_counter() - start)
        return result


def drain(conn: Connection) -> None:
    """The other end of the pipe: receives and forgets."""
    try:
        while True:
            conn.recv()
    except EOFError:
        return


def measure_engine(streams: int, tokens: int, profile: bool = False, overlap: bool = False) -> EngineCost:
    """Steps in which all ``streams`` requests decode, over a pipe to another process."""
    ours, theirs = SPAWN.Pipe()
    peer = SPAWN.Process(target=drain, args=(theirs,), daemon=True)
    peer.start()
    theirs.close()
    try:
        return _measure_engine(ours, NullStart(streams, overlap=overlap), tokens, profile)
    finally:
        ours.close()
        peer.join(10)


def _measure_engine(conn: Connection, start: NullStart, tokens: int, profile: bool) -> EngineCost:
    core, _ = null_core(start)
    loop = WorkerLoop(conn, null_running(core))
    launch, step, send = _Clock(core.engine.launch), _Clock(core.step), _Clock(loop._send)
    core.engine.launch = launch  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=tokens, ignore_eos=True)
    for number in range(start.streams):
        core.submit(f"request-{number:08}-0", [97 + (number + i) % 26 for i in range(PROMPT_TOKENS)], params)
    for _ in range(20):  # prompts, and whatever is lazy at first
        send(step())
    profiler = cProfile.Profile() if profile else None
    for clock in (launch, step, send):
        clock.seconds.clear()
    cpu = time.thread_time()
    if profiler is not None:
        profiler.enable()
    for _ in range(tokens - 40):
        send(step())
    cpu = time.thread_time() - cpu
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    assert len(core.scheduler.running) == start.streams, "a request ended before its time"
    walls = [a + b for a, b in zip(step.seconds, send.seconds, strict=True)]
    plans = [a - b for a, b in zip(step.seconds, launch.seconds, strict=True)]
    return EngineCost(
        streams=start.streams,
        steps=len(walls),
        step_ms=median(walls) * 1000,
        p99_ms=percentile(walls, 99) * 1000,
        plan_ms=median(plans) * 1000,
        launch_ms=median(launch.seconds) * 1000,
        send_ms=median(send.seconds) * 1000,
        cpu_ms=cpu / len(walls) * 1000,
    )


# ------------------------------------------------------------------------------------------- HTTP process


def measure_http(streams: int, tokens: int, model_ms: float) -> HttpCost:
    """Two paced runs, whose difference gives the cost of a token, and an unpaced one for the highest rate."""
    with _served(NullStart(streams, model_ms=model_ms)) as server:
        server.load(streams, 10)  # connections, imports, the first of everything
        few = max(10, tokens // 10)
        cpu_few, _ = server.load(streams, few)
        cpu_many, answers = server.load(streams, tokens)
    with _served(NullStart(streams)) as server:
        server.load(streams, 10)
        start = time.perf_counter()
        server.load(streams, tokens)
        most = streams * tokens / (time.perf_counter() - start)
    per_token = (cpu_many - cpu_few) / (streams * (tokens - few))
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    spread = Spread.of(gaps)
    assert spread is not None, "no gap was measured"
    return HttpCost(
        streams=streams,
        tokens=tokens,
        model_ms=model_ms,
        cpu_us_per_token=per_token * 1e6,
        cpu_ms_per_request=(cpu_few / streams - few * per_token) * 1000,
        extra_gap_ms=median(gaps) * 1000 - model_ms,
        p99_gap_ms=spread.p99 * 1000,
        most_tok_s=most,
    )


class _Served:
    def __init__(self, address: Address, control: Connection) -> None:
        self._server = ChatServer(address, "null", {"ignore_eos": True}, None, 300)
        self._control = control

    def load(self, streams: int, tokens: int) -> tuple[float, list[Exchange]]:
        """One answer of ``tokens`` on each stream; the HTTP process's CPU seconds, and the answers."""
        before = self._cpu_s()
        answers = asyncio.run(self._answers(streams, tokens))
        return self._cpu_s() - before, answers

    async def _answers(self, streams: int, tokens: int) -> list[Exchange]:
        asks = (self._server.ask(f"{number} " + "x" * PROMPT_TOKENS, tokens) for number in range(streams))
        answers = list(await asyncio.gather(*asks))
        assert all(answer.completion_tokens == tokens for answer in answers), "an answer was cut short"
        return answers

    def _cpu_s(self) -> float:
        self._control.send("cpu")
        seconds: float = self._control.recv()
        return seconds

    async def wait_ready(self) -> None:
        for _ in range(600):
            try:
                await self._server.get("/ready")
                return
            except Exception:  # not yet: any refusal or broken answer counts as that
                await asyncio.sleep(0.1)
        raise RuntimeError("the null server did not become ready within 60 s")


@contextmanager
def _served(start: NullStart) -> Iterator[_Served]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=null_http, args=(theirs, start))
    process.start()
    theirs.close()
    try:
        served = _Served(Address("127.0.0.1", ours.recv()), ours)
        asyncio.run(served.wait_ready())
        yield served
    finally:
        ours.close()
        process.join(20)
        if process.is_alive():
            process.kill()


# ------------------------------------------------------------------------------------------- the report


def show(engine: EngineCost | None, http: HttpCost | None) -> None:
    """Tables on standard output."""
    console = Console()
    if engine is not None:
        table = Table(title=f"engine process, {engine.streams} streams, {engine.steps} decode steps, outside the model")
        for name in ("a step", "p99", "plan and commit", "batch and sampler rows", "pipe", "CPU"):
            table.add_column(name, justify="right")
        values = (engine.step_ms, engine.p99_ms, engine.plan_ms, engine.launch_ms, engine.send_ms, engine.cpu_ms)
        table.add_row(*(f"{value:.3f} ms" for value in values))
        console.print(table)
    if http is not None:
        table = Table(
            title=f"HTTP process, {http.streams} streams, {http.tokens} tokens each, model {http.model_ms} ms"
        )
        for name in ("CPU a token", "CPU a request", "gap beyond the model", "p99 gap", "most, no model"):
            table.add_column(name, justify="right")
        table.add_row(
            f"{http.cpu_us_per_token:.1f} µs", f"{http.cpu_ms_per_request:.2f} ms", f"{http.extra_gap_ms:.2f} ms",
            f"{http.p99_gap_ms:.2f} ms", f"{http.most_tok_s:.0f} tok/s",
        )  # fmt: skip
        console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="answer of each stream")
    parser.add_argument("--model-ms", type=float, default=20.0, help="how long the null model sleeps under HTTP")
    parser.add_argument(
        "--overlap", action="store_true", help="plan the next step before the last is read, as on a GPU"
    )
    parser.add_argument("--only", choices=("engine", "http"))
    parser.add_argument("--profile", action="store_true", help="the engine's hot spots, on standard error")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    engine = http = None
    if given.only != "http":
        engine = measure_engine(given.streams, given.tokens, given.profile, given.overlap)
    if given.only != "engine":
        http = measure_http(given.streams, given.tokens, given.model_ms)
    if given.json:
        print(json.dumps({"engine": engine and asdict(engine), "http": http and asdict(http)}, indent=2))
    else:
        show(engine, http)
    return 0


if __name__ == "__main__":
    sys.exit(main())
