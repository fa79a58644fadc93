"""This server and another one with offloaded experts, on the same files, measured alike from outside.

    python3 benchmarks/compare_monolith.py --peer-python python3 --peer-pythonpath DIR [--routers uniform,zipf:1.0]

The other one is by default the monolith ``freetoken`` 0.1.3, installed in a folder of its own, since it has our import
name. For each router a checkpoint of random weights (Qwen3-30B-A3B's dimensions, 8 layers) is made once; both servers
are started on it one after the other, with slots for a quarter of the experts and chunks of 4096 tokens, and asked for:

- the time to first token of a 12k-token prompt, the first and the median of the next;
- tokens a second of one stream, the median of three;
- tokens a second of 16 and of 64 streams.

Tokens are drawn at temperature 1, so that their routing is that of the router and not of a text that repeats itself.
For this server the bytes over the link are printed too, by cause. Every figure is printed and written to ``--json``
when it is known; what no longer fits in ``--limit`` is named and left out. Exit code 1 when something failed.

``--kind tiny-qwen3-moe --device cpu --peer-self`` tries the script anywhere: this server against itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen
from checkpoint_kinds import KINDS, with_layers
from gpu_serve import SERVE, Server, figures, measured
from make_checkpoint import make_checkpoint, read_router

from freetoken.serve.bench.plan import BenchPlan

OURS = (
    "--moe-strategy offload --moe-offload-fraction {share} --max-seq-len {longest} --max-running-requests {running}"
    " --max-prefill-tokens {chunk} --device {device}"
)
PEER = (
    "--model {model} --moe-strategy offload --moe-cache-rate {share} --attn triton --served-model-name m"
    " --max-seq-len-override {longest} --max-running-requests {running} --max-prefill-length {chunk} --port {port}"
)
SETTLE_S = 2.2  # the engine tells its counters once a second


@frozen
class Contender:
    """A server: the words that start it, ``{model}`` and ``{port}`` still open, and how it says that it serves."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready_path: str
    not_ready: str = ""

    def start(self, directory: Path, log: Path) -> Server:
        return Server(
            directory, log, (), command=self.command, environment=self.environment, ready_path=self.ready_path,
            not_ready=self.not_ready,
        )  # fmt: skip


def contenders(given: argparse.Namespace, folder: Path) -> list[Contender]:
    sizes = {
        "share": given.share, "longest": given.max_seq_len, "running": max(given.streams), "chunk": given.chunk,
        "device": given.device, "model": "{model}", "port": "{port}",
    }  # fmt: skip
    ours = (*SERVE, *OURS.format_map(sizes).split(), *given.ours_flags.split())
    # A cache folder of its own for each: notes on the last router's experts are no use, and the other one has none.
    fresh = [("--cache-dir", tempfile.mkdtemp(dir=folder)) for _ in range(2)]
    found = [Contender("ours", (*ours, *fresh[0]), {}, "/ready")]
    if given.peer_self:
        found.append(Contender("ours again", (*ours, *fresh[1]), {}, "/ready"))
    elif given.peer_python:
        words = (*given.peer_python.split(), "-m", "freetoken", *PEER.format_map(sizes).split())
        paths = {"PYTHONPATH": given.peer_pythonpath} if given.peer_pythonpath else {}
        peer = (*words, *given.peer_flags.split())
        found.append(Contender("monolith", peer, paths, given.peer_ready, given.peer_not_ready))
    return found


def plans(given: argparse.Namespace) -> list[tuple[str, BenchPlan]]:
    """What is asked for, one after the other; the cheapest figures that matter most come first."""
    few = min(given.load_tokens, given.decode_tokens)
    found = [
        ("decode", BenchPlan((), 3, given.decode_tokens, 100, ())),
        ("prompt", BenchPlan((given.prompt,), 3, 0, 100, ())),
    ]
    for streams in given.streams:
        plan = BenchPlan((), 1, few, 100, (streams,), given.load_prompt, requests=1)
        found.append((f"streams {streams}", plan))
    return found


def ask(server: Server, plan: BenchPlan, timeout_s: float, temperature: float) -> dict[str, Any]:
    """The figures of one plan, and what crossed the link for them."""

    async def within() -> Any:
        extra = {"ignore_eos": True, "temperature": temperature}
        return await asyncio.wait_for(measured(server.url, plan, extra), timeout_s)

    before, started = server.moe_counters(), time.perf_counter()
    result = asyncio.run(within())
    found = figures(result) | {"seconds": round(time.perf_counter() - started, 2)}
    if plan.streams:  # the single stream before the load is only there because a plan has one
        found = {name: value for name, value in found.items() if name not in ("decode_tok_s", "gap_ms_p50_p99")}
    if before:
        time.sleep(SETTLE_S)
        after = server.moe_counters()
        change = {name: after[name] - before.get(name, 0.0) for name in after}
        looked = change.get("hits", 0.0) + change.get("misses", 0.0)
        found["hit_rate"] = round(change.get("hits", 0.0) / looked, 4) if looked else None
        found["link_gb"] = {
            name.removeprefix("moved_bytes_"): round(size / 1e9, 3)
            for name, size in change.items()
            if name.startswith("moved_bytes_") and size
        }
    return found


class Results:
    """Kept as JSON, printed as lines."""

    def __init__(self, path: Path | None, limit_s: float) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.failed = False
        self._until = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def put(self, router: str, name: str, what: str, **values: Any) -> None:
        values = {k: " ".join(v.split())[:300] if isinstance(v, str) else v for k, v in values.items()}
        self.failed |= "error" in values
        self.rows.append({"router": router, "server": name, "what": what, **values})
        print(f"{router:8} {name:10} {what:10}", " ".join(f"{k}={v}" for k, v in values.items()), flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.rows, indent=1))

    def ratios(self) -> None:
        """How many times as fast as the other one this server was."""
        for row in self.rows:
            if row["server"] == "ours":
                other = [
                    r for r in self.rows if (r["router"], r["what"]) == (row["router"], row["what"]) and r is not row
                ]
                for mine, theirs in ((_speed(row, n), _speed(o, n)) for o in other for n in _FIGURES):
                    if mine and theirs:
                        print(f"{row['router']:8} ours ÷ {other[0]['server']}: {row['what']} {mine / theirs:.3f}")


_FIGURES = ("decode_tok_s", "ttft_tokens_first_again_s", "streams")


def _speed(row: Mapping[str, Any], name: str) -> float | None:
    """A figure as a speed: tokens a second, or prompts a second."""
    if name == "ttft_tokens_first_again_s":
        return 1 / row[name][0][2] if row.get(name) else None
    if name == "streams":
        return next((float(v["out_tok_s"]) for k, v in row.items() if k.startswith("streams_")), None)
    return float(row[name]) if name in row else None


def compare(given: argparse.Namespace, router: str, folder: Path, results: Results) -> None:
    """One checkpoint, each server on it."""
    directory = folder / "checkpoint"
    started = time.perf_counter()
    config = with_layers(KINDS[given.kind], given.layers)
    for _ in make_checkpoint(config, directory, zipf=read_router(router), seed=given.seed, device=given.device):
        pass
    results.put(router, "", "checkpoint", seconds=round(time.perf_counter() - started, 1))
    try:
        for contender in contenders(given, folder):
            if results.left_s < 20:
                results.put(router, contender.name, "all", skipped="no time left")
                continue
            one_server(given, router, contender, directory, results)
    finally:
        shutil.rmtree(directory)


def one_server(given: argparse.Namespace, router: str, contender: Contender, directory: Path, results: Results) -> None:
    log = given.logs / f"{contender.name}-{router}.log".replace(" ", "-").replace(":", "-")
    server = contender.start(directory, log)
    try:
        ready_s = server.wait_ready(min(given.ready_timeout, results.left_s))
        results.put(router, contender.name, "start", ready_s=round(ready_s, 1))
        for what, plan in plans(given):
            if results.left_s < 10:
                results.put(router, contender.name, what, skipped="no time left")
                continue
            try:
                found = ask(server, plan, min(given.part_limit, results.left_s), given.temperature)
                results.put(router, contender.name, what, **found)
            except (Exception, SystemExit) as error:
                results.put(router, contender.name, what, error=f"{type(error).__name__}: {error}")
    except RuntimeError as error:
        results.put(router, contender.name, "start", error=str(error)[-300:])
    finally:
        server.stop()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default="", help="the interpreter of the other server; none: this one alone")
    parser.add_argument("--peer-pythonpath", default="", help="the folder that the other one is installed in")
    parser.add_argument("--peer-flags", default="", help="further flags of the other one")
    parser.add_argument("--peer-ready", default="/health")
    parser.add_argument("--peer-not-ready", default="loading|warmup", help="while its answer matches, it is not ready")
    parser.add_argument("--peer-self", action="store_true", help="compare this server with itself")
    parser.add_argument("--ours-flags", default="", help="further flags of freetoken serve")
    parser.add_argument("--kind", default="qwen3-30b-a3b", choices=list(KINDS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--routers", default="uniform,zipf:1.0")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts in slots")
    parser.add_argument("--prompt", type=int, default=12_288)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--max-seq-len", type=int, default=16_384)
    parser.add_argument("--streams", type=lambda s: tuple(map(int, s.split(","))), default=(16, 64))
    parser.add_argument("--decode-tokens", type=int, default=192)
    parser.add_argument("--load-tokens", type=int, default=64, help="of each answer under load")
    parser.add_argument("--load-prompt", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--part-limit", type=float, default=60.0, help="seconds for one measurement")
    parser.add_argument("--ready-timeout", type=float, default=150.0)
    parser.add_argument("--dir", type=Path, help="where checkpoints are made; by default a temporary folder")
    parser.add_argument("--logs", type=Path, help="where the servers' logs go; by default there")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    for router in given.routers.split(","):
        read_router(router)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    results = Results(given.json, given.limit)
    with tempfile.TemporaryDirectory(dir=given.dir) as temporary:
        folder = Path(temporary)
        given.logs = given.logs or folder
        given.logs.mkdir(parents=True, exist_ok=True)
        for router in given.routers.split(","):
            if results.left_s < 60:
                results.put(router, "", "all", skipped="no time left")
                continue
            compare(given, router, folder, results)
    results.ratios()
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
