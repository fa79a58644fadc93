"""What warmup promises, on a GPU: certificates of a cold and a warm start, first ÷ again, its cost, no late events.

    python3 benchmarks/gpu_warmup.py [--model KIND|DIR]… [--parts cold,warm,lengths,pairs] [--json PATH] [--toy]

For each model, whole depth and random weights, all caches in a folder of its own that is empty at first:

- ``cold``: start → ready, then ``freetoken warmup verify`` with 200 probes against that server;
- ``warm``: the same on the caches that this left; then mixed traffic (batches, prefixes, every sampler route, broken
  off streams), and after it the late-event counters of ``/metrics`` and ``/health``, which must be 0;
- ``lengths``: two more starts, each with the first request at a prompt length and three more of it: first ÷ again at
  most 1.15, or within 5 ms;
- ``pairs``: with few layers, start → ready with the policies ``ladder`` and ``none`` in turn on warm caches: the
  median of the differences is at most 0.5 s; of the first model only.

Without ``--model`` both published models are measured. ``warm``, ``lengths`` and ``pairs`` use the caches in
``--work``, so parts may be run by several commands; only ``cold`` empties them. A part takes ``--part-limit`` seconds
at most, and all of them ``--limit``; what is left out is named. Results are in the JSON file after every part; the
lines printed are few. ``--toy`` runs all of it on a CPU at toy sizes, to try the script. Exit code 1 where something is
missed or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from attrs import evolve, field, frozen

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_kinds import KINDS, with_layers
from gpu_serve import LENGTHS, Server, measured, write_model
from mixed_traffic import run_mixed

from freetoken.serve.bench.plan import BenchPlan

PARTS = ("cold", "warm", "lengths", "pairs")
MODELS = ("qwen3-30b-a3b", "qwen3.6-35b-a3b")
FLAGS = ("--max-seq-len", "16384", "--max-running-requests", "32")
RATIO, WITHIN_MS, COST_S = 1.15, 5.0, 0.5
LAST_S = 8.0
"""Left of a part's time for a verification to tell what it proved, and for the server to end."""


class OutOfTimeError(Exception):
    """A part took longer than it may."""


@frozen
class Scale:
    """Sizes of a run."""

    flags: tuple[str, ...] = FLAGS
    lengths: tuple[int, ...] = LENGTHS
    repeats: int = 3
    starts: int = 2
    probes: int = 200
    pairs: int = 5
    pair_layers: int = 4
    mixed_s: float = 20.0
    workers: int = 16
    policies: tuple[str, str] = ("ladder", "none")


TOY = Scale(
    flags=(
        "--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-seq-len", "256", "--max-prefill-tokens", "64",
        "--max-running-requests", "4",
    ),
    lengths=(20, 33), repeats=1, starts=1, probes=10, pairs=1, pair_layers=4, mixed_s=2.0, workers=3,
)  # fmt: skip


@frozen
class Model:
    """A model's folder, those of its caches, and what to start it with."""

    name: str
    directory: Path
    work: Path
    scale: Scale

    @property
    def caches(self) -> dict[str, str]:
        """Variables that keep everything that is compiled inside ``work``."""
        folder = self.work / "caches"
        names = {"TRITON_CACHE_DIR": "triton", "FREETOKEN_CACHE_DIR": "freetoken", "CUDA_CACHE_PATH": "nv"}
        return {variable: str(folder / name) for variable, name in names.items()}

    def empty_caches(self) -> None:
        shutil.rmtree(self.work / "caches", ignore_errors=True)

    @contextmanager
    def served(
        self, log: str, timeout_s: float, flags: Sequence[str] = (), directory: Path | None = None
    ) -> Iterator[tuple[Server, float]]:
        """A server that is ready, and the seconds that took; it is ended afterwards."""
        self.work.mkdir(parents=True, exist_ok=True)
        server = Server(
            directory or self.directory, self.work / f"{log}.log",
            ("--load-format", "dummy", *self.scale.flags, *flags), environment=self.caches,
        )  # fmt: skip
        try:
            yield server, round(server.wait_ready(timeout_s), 2)
        finally:
            server.stop()


@frozen
class Report:
    """Results as lines, and as one JSON file after each part."""

    path: Path | None
    until: float
    part_limit_s: float
    found: dict[str, Any] = field(factory=dict)
    missed: list[str] = field(factory=list)

    def put(self, name: str, **values: Any) -> None:
        self.found[name] = {**self.found.get(name, {}), **values}
        print(f"{name}:", " ".join(f"{k}={_short(v)}" for k, v in values.items()), flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps({"found": self.found, "missed": self.missed}, indent=1))

    def judge(self, name: str, met: bool, words: str) -> None:
        """Whether what was promised holds."""
        if not met:
            self.missed.append(f"{name}: {words}")
        self.put(f"{name} {'holds' if met else 'MISSED'}", what=words)

    def part(self, name: str, do: Callable[[float], None]) -> None:
        """``do(limit_s)`` within its time, if there is any left."""
        limit_s, start = min(self.until - time.monotonic(), self.part_limit_s), time.perf_counter()
        if limit_s < 2 * LAST_S:
            self.judge(name, met=False, words="no time was left for it")
            return
        previous = signal.signal(signal.SIGALRM, _out_of_time)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            do(limit_s)
        except Exception as error:
            traceback.print_exc(limit=-3, file=sys.stdout)
            self.judge(name, met=False, words=f"{type(error).__name__}: {error}"[-500:])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        self.put(f"{name} took", s=round(time.perf_counter() - start, 1))


def _out_of_time(*_: object) -> None:
    raise OutOfTimeError("the part's time is up")


def _short(value: object) -> str:
    text = json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)
    return text if len(text) <= 700 else text[:700] + "…"


# ------------------------------------------------------------------------------------------------ the parts


def cold(model: Model, report: Report, limit_s: float) -> None:
    """Must-show 4, its cold half."""
    model.empty_caches()
    began = time.monotonic()
    with model.served("cold", limit_s, ("--profile-endpoint",)) as (server, ready_s):
        report.put(f"{model.name} cold", ready_s=ready_s, start=start_line(server))
        verify(model, server, report, "cold", began + limit_s)


def warm(model: Model, report: Report, limit_s: float) -> None:
    """Must-show 4, its warm half, and 6."""
    began = time.monotonic()
    flags = ("--profile-endpoint", "--on-late-compile", "warn")
    with model.served("warm", limit_s, flags) as (server, ready_s):
        report.put(f"{model.name} warm", ready_s=ready_s, start=start_line(server))
        verify(model, server, report, "warm", began + limit_s - 2 * model.scale.mixed_s)
        mixed(model, server, report)


def verify(model: Model, server: Server, report: Report, start: str, until: float) -> None:
    """``freetoken warmup verify`` against a server, ended in time to tell what it proved."""
    limit_s = until - time.monotonic() - LAST_S
    command = [
        sys.executable, "-m", "freetoken", "warmup", "verify", server.url, "--json", "--probes",
        str(model.scale.probes), "--time-limit", str(max(1.0, limit_s)),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **model.caches}, timeout=limit_s + LAST_S
    )
    (model.work / f"verify-{start}.log").write_text(done.stderr)
    if not done.stdout.lstrip().startswith("{"):
        raise RuntimeError(f"verify ended with {done.returncode}: {done.stderr[-600:]}")
    certificate = json.loads(done.stdout)
    name = f"{model.name} verify {start}"
    report.put(
        name, probes=certificate["probes"], s=round(certificate["seconds"], 1), up_to=certificate["up_to_tokens"],
        worst_ms=round(certificate["worst_excess_ms"], 1), counters=certificate["counters"],
        profiled=certificate["evidence"],
    )  # fmt: skip
    for slow in certificate["slow"][:3]:
        words = {k: slow[k] for k in ("name", "new", "prefix", "batch", "sampling", "first_ms", "again_ms", "late")}
        report.put(f"{name} slow {slow['name']} {slow['new']}+{slow['prefix']}", probe=words)
    report.found[name]["certificate"] = certificate
    report.judge(name, certificate["passes"], "; ".join(certificate["failures"]) or "certified")


def mixed(model: Model, server: Server, report: Report) -> None:
    """Traffic as people make it, and what the watch and the log say of it."""
    before = server.late_events()
    counted = run_mixed(server.url, model.scale.mixed_s, model.scale.workers)
    time.sleep(1.5)  # counters come about once a second
    after, health = server.late_events(), health_of(server)
    late = re.findall(r"after the warmup: (.*)", server.log.read_text(errors="replace"))
    name = f"{model.name} mixed"
    report.put(name, **counted.as_json(), late_before=before, late_after=after, health=health, what=late[:5])
    quiet = bool(after) and not any(after.values()) and not any(health.values())
    words = "no late event" if quiet else f"late events {after}, {health}: {late[:5]}"
    report.judge(name, quiet and not counted.errors, words if not counted.errors else counted.errors[0][:300])


def health_of(server: Server) -> dict[str, int]:
    with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
        found: dict[str, int] = json.loads(answer.read())["late_events"]
    return found


def start_line(server: Server) -> str:
    """Where the start's time went, as its log says."""
    lines = re.findall(r"freetoken\.engine: start: (.*)", server.log.read_text(errors="replace"))
    return lines[-1] if lines else ""


def lengths(model: Model, report: Report, limit_s: float) -> None:
    """Must-show 4, the view from outside; starts of their own, so that every length is met for the first time."""
    began = time.monotonic()
    plan = BenchPlan(lengths=model.scale.lengths, repeats=model.scale.repeats, decode_tokens=0, streams=())
    for number in range(1, model.scale.starts + 1):
        with model.served(f"lengths{number}", limit_s - (time.monotonic() - began)) as (server, ready_s):
            result = asyncio.run(measured(server.url, plan, {"ignore_eos": True}))
        rows = [[x.prompt_tokens, round(x.first_s, 4), round(x.again_median_s, 4)] for x in result.lengths]
        name = f"{model.name} lengths {number}"
        report.put(name, ready_s=ready_s, tokens_first_again_s=rows)
        over = [row for row in rows if not as_fast(row[1], row[2])]
        report.judge(name, not over, f"first ÷ again over {RATIO} and {WITHIN_MS:g} ms: {over or 'nowhere'}")


def as_fast(first_s: float, again_s: float) -> bool:
    """At most 1.15 times as long, or within 5 ms."""
    return first_s <= RATIO * again_s or 1000 * (first_s - again_s) <= WITHIN_MS


def pairs(model: Model, report: Report, limit_s: float) -> None:
    """Must-show 5, the cost; the first start of each policy fills the caches and is not counted."""
    began = time.monotonic()
    small = shallow(model)
    took: dict[str, list[float]] = {policy: [] for policy in model.scale.policies}
    try:
        for number in range(model.scale.pairs + 1):
            for policy in model.scale.policies:
                left = limit_s - (time.monotonic() - began)
                with model.served(f"pair-{policy}", left, ("--warmup-policy", policy), small) as (_, ready_s):
                    if number:
                        took[policy].append(ready_s)
    finally:
        whole = min(map(len, took.values()))
        report.put(f"{model.name} pairs", layers=model.scale.pair_layers, **took)
    ladder, none = (took[policy][:whole] for policy in model.scale.policies)
    cost = round(median(a - b for a, b in zip(ladder, none, strict=True)), 2)
    words = f"ready {median(ladder):.2f} s, without warmup {median(none):.2f} s, median of {whole} differences {cost} s"
    report.judge(f"{model.name} pairs", cost <= COST_S, words)


def shallow(model: Model) -> Path:
    """The same model with few layers."""
    found = model.work / "shallow"
    shutil.rmtree(found, ignore_errors=True)
    shutil.copytree(model.directory, found, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((model.directory / "config.json").read_text())
    (found / "config.json").write_text(json.dumps(with_layers(config, model.scale.pair_layers)))
    return found


DO: Mapping[str, Callable[[Model, Report, float], None]] = {
    "cold": cold, "warm": warm, "lengths": lengths, "pairs": pairs,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ the command


def made(word: str, work: Path, scale: Scale) -> Model:
    """A kind, whose configuration is written anew, or a folder that has one."""
    name = word if word in KINDS else Path(word).name
    directory = work / name / "model" if word in KINDS else Path(word)
    if word in KINDS:
        write_model(word, directory)
    elif not (directory / "config.json").is_file():
        raise SystemExit(f"--model {word}: neither a kind ({', '.join(KINDS)}) nor a folder with config.json")
    return Model(name, directory, work / name, scale)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", metavar="KIND|DIR")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "freetoken-gpu-warmup")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all")
    parser.add_argument("--part-limit", type=float, default=240.0, help="seconds for one part of one model")
    parser.add_argument("--probes", type=int)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--flag", action="append", default=[], help="one more word for every server")
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy sizes")
    given = parser.parse_args(words)
    scale = TOY if given.toy else Scale()
    scale = evolve(
        scale,
        flags=(*scale.flags, *given.flag),
        probes=given.probes or scale.probes,
        pairs=given.pairs or scale.pairs,
    )
    parts = given.parts.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"--parts {','.join(unknown)}: known are {', '.join(PARTS)}")
    report = Report(given.json, time.monotonic() + given.limit, given.part_limit)
    chosen = given.model or (("tiny-qwen3-moe",) if given.toy else MODELS)
    models = [made(word, given.work, scale) for word in chosen]
    for part in [part for part in PARTS if part in parts]:
        for model in models[:1] if part == "pairs" else models:
            report.part(f"{model.name} {part}", lambda limit_s, m=model, p=part: DO[p](m, report, limit_s))  # type: ignore[misc]
    report.put("in all", missed=report.missed)
    return int(bool(report.missed))


if __name__ == "__main__":
    sys.exit(main())
