"""Experts in host memory on a GPU: decode by routing, long prompts, decodes beside them, and correctness.

    python3 benchmarks/gpu_offload.py [--parts zipf,prefill] [--layers 8] [--json PATH] [--device cpu]

At the dimensions of Qwen3-30B-A3B with few layers, random weights, and slots for a quarter of the experts; the most
important part first, each a line or two:

- ``zipf``: a captured step of the expert layers alone with Zipf-1.0 routing, 1 and 16 tokens: hit rate, share of the
  link, and what the look-up takes when nothing is missing; ``uniform``: the same with uniform routing;
- ``prefill``: a whole engine with a 12k-token prompt in 4096-token chunks: its time to first token against the time of
  moving the experts it is routed to once (floor 1.15), with and without foresight, three prompts each;
- ``beside``: the same prompt while four others decode: its time to first token, and the gaps between their tokens;
- ``stream``: the engine's decode with 1 and with 16 streams;
- ``check``: offload against resident with the same kernels, bit for bit where a step is one pass;
- ``tokens``: greedy tokens of whole engines, offload and resident;
- ``chunks``: the long prompt chunk by chunk, without windows; ``lru``: decode with the other policy;
- ``link``: what the fetch kernel moves a second in several shapes.

``--limit`` seconds for all: a part that would begin later is skipped and named, and one that takes more than
``--part-limit`` is ended. ``--device cpu`` runs everything but graphs and rates at toy sizes, to try the script. A part
that fails does not stop the others; exit code 1 then.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field

sys.path.insert(0, str(Path(__file__).parent))

from offload_layers import (
    Scale,
    big,
    check,
    decode_case,
    fetch_rates,
    fill,
    link_rate,
    seconds,
    setup_of,
    synchronize,
    toy,
)

from freetoken import LLM, SamplingParams
from freetoken_moe_offload.strategy import OffloadExperts

PARTS = ("zipf", "prefill", "beside", "stream", "uniform", "check", "tokens", "chunks", "lru", "link")
KIND = "qwen3-30b-a3b"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
ONE = evolve(GREEDY, max_tokens=1)


class OutOfTimeError(Exception):
    """A part took longer than it may."""


class Report:
    """Results as lines, and as one JSON file after each."""

    def __init__(self, path: Path | None, limit_s: float, part_limit_s: float) -> None:
        self.path = path
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []
        self._until = time.monotonic() + limit_s
        self._part_limit_s = part_limit_s

    def put(self, name: str, **values: Any) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        self.found[name] = rounded
        print(f"{name:26}", " ".join(f"{k}={v}" for k, v in rounded.items()), flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps({"found": self.found, "failed": self.failed}, indent=1))

    def part(self, name: str, do: Callable[[], None]) -> None:
        """``do()`` within its time, if there is any left."""
        left, start = self._until - time.monotonic(), time.perf_counter()
        if left < 5:
            self.put(f"{name} SKIPPED", reason="no time left")
            return
        previous = signal.signal(signal.SIGALRM, _out_of_time)
        signal.setitimer(signal.ITIMER_REAL, min(left, self._part_limit_s))
        try:
            do()
        except Exception as error:
            traceback.print_exc(limit=-4, file=sys.stdout)
            self.failed.append(name)
            self.put(f"{name} FAILED", error=f"{type(error).__name__}: {error}"[:300])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        self.put(f"{name} took", s=round(time.perf_counter() - start, 1))


def _out_of_time(*_: object) -> None:
    raise OutOfTimeError("the part's time is up")


# ------------------------------------------------------------------------------------------- whole engines


@contextmanager
def engine(scale: Scale, directory: Path, strategy: str, **options: Any) -> Iterator[LLM]:
    given = {"moe-offload": options} if strategy == "offload" else {}
    dtype = "bfloat16" if scale.device == "cuda" else "float32"
    with LLM(
        str(directory), device=scale.device, dtype=dtype, load_format="dummy" if scale.device == "cuda" else "auto",
        moe_strategy=strategy, max_seq_len=2 * scale.prompt, max_prefill_tokens=scale.chunk, max_running_requests=16,
        prefix_cache=False, kv_tokens=4 * scale.prompt, plugin_options=given,
        cache_dir=str(directory.parent / "cache"),
    ) as llm:  # fmt: skip
        yield llm
    gc.collect()
    synchronize()


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1000 * sum(lengths) + seed)
    return [torch.randint(10, 250, (n,), generator=generator).tolist() for n in lengths]


def write(scale: Scale, directory: Path) -> None:
    if scale.device == "cpu":
        from freetoken.models import qwen3_moe
        from freetoken.testing.checkpoints import write_tiny

        write_tiny(qwen3_moe.FAMILY, directory)
        return
    from gpu_serve import write_model

    write_model(KIND, directory, scale.layers)


def routed_bytes(llm: LLM, prompt: list[int]) -> int:
    """Bytes of the experts that a prompt is routed to, each once; noted where the strategy is called."""
    strategy = llm.running.built.moe
    seen: set[tuple[int, int]] = set()
    start = strategy.start

    def noting(layer: int, hidden: Any, weights: Any, experts: torch.Tensor) -> Any:
        seen.update((layer, expert) for expert in set(experts.flatten().tolist()))
        return start(layer, hidden, weights, experts)

    strategy.start = noting
    llm.generate([prompt], ONE)
    del strategy.start
    return len(seen) * int(strategy._caches[0].group.expert_bytes)


def long_prompt(scale: Scale, llm: LLM, rate: float, seed: int, foresee: bool) -> dict[str, float]:
    """Time to first token as a multiple of moving the prompt's experts once, and what crossed of them."""
    (prompt,) = prompts_of(scale.prompt, seed=seed)
    strategy = llm.running.built.moe
    strategy._looks_ahead = foresee
    wanted = routed_bytes(llm, prompts_of(scale.prompt, seed=seed + 100)[0])
    before = strategy.stats()
    took = seconds(lambda: llm.generate([prompt], ONE))
    after = strategy.stats()
    moved = {cause: after.moved_bytes[cause] - before.moved_bytes[cause] for cause in ("prefill", "hint")}
    return {
        "ttft_s": took, "times_moving_once": took * rate / wanted, "moved_of_routed": sum(moved.values()) / wanted,
        "ahead": moved["hint"] / wanted, "wasted": (after.wasted_bytes - before.wasted_bytes) / wanted,
        "link_share": sum(moved.values()) / took / rate, "stall_ms": after.stall_ms - before.stall_ms,
        "routed_share": wanted / (scale.layers * scale.experts * scale.expert_bytes),
    }  # fmt: skip


def streams(scale: Scale, llm: LLM, count: int, rate: float) -> dict[str, float]:
    """Tokens a second of ``count`` requests at once, after their first."""
    core, strategy = llm.running.core, llm.running.built.moe
    steps = max(scale.decode_steps // (1 if count == 1 else 4), 4)
    for index, prompt in enumerate(prompts_of(*range(20, 20 + count))):
        core.submit(f"stream-{index}", prompt, evolve(GREEDY, max_tokens=steps))
    first: set[str] = set()
    while len(first) < count:
        first |= {output.request_id for output in core.step() if output.tokens}
    before, start, tokens = strategy.stats(), time.perf_counter(), 0
    while not core.idle:
        tokens += sum(len(output.tokens) for output in core.step())
    took = time.perf_counter() - start
    after = strategy.stats()
    moved = after.moved_bytes["decode"] - before.moved_bytes["decode"]
    looked = after.hits + after.misses - before.hits - before.misses
    return {
        "tokens_s": tokens / took, "us_a_layer": took / max(tokens / count, 1) / scale.layers * 1e6,
        "link_share": moved / took / rate, "hit_rate": (after.hits - before.hits) / max(looked, 1),
    }  # fmt: skip


def crowded_prompt(scale: Scale, llm: LLM) -> dict[str, Any]:
    """The long prompt while four others decode: its time to first token, and the gaps between their tokens."""
    core, strategy = llm.running.core, llm.running.built.moe
    for index, prompt in enumerate(prompts_of(30, 31, 32, 33)):
        core.submit(f"small-{index}", prompt, evolve(GREEDY, max_tokens=scale.prompt // 2))
    last: dict[str, float] = {}
    alone: list[float] = []
    while len(alone) < 40:
        for output in core.step():
            now = time.perf_counter()
            if output.request_id in last:
                alone.append(now - last[output.request_id])
            last[output.request_id] = now
    before = strategy.stats()
    core.submit("large", prompts_of(scale.prompt)[0], ONE)
    start, gaps, ttft = time.perf_counter(), [], 0.0
    while not ttft and not core.idle:
        for output in core.step():
            now = time.perf_counter()
            if output.request_id == "large":
                ttft = now - start
            elif output.tokens:
                gaps.append(now - last[output.request_id])
                last[output.request_id] = now
    after = strategy.stats()
    for index in range(4):
        core.abort(f"small-{index}")
    while not core.idle:
        core.step()
    gaps.sort()
    alone.sort()
    return {
        "ttft_s": ttft, "longest_gap_s": max(gaps, default=0.0), "median_gap_s": gaps[len(gaps) // 2] if gaps else 0.0,
        "alone_gap_s": alone[len(alone) // 2], "allowed_gap_s": core.limits.max_gap_ms / 1e3, "tokens": len(gaps),
        "prefill_gb": (after.moved_bytes["prefill"] - before.moved_bytes["prefill"]) / 1e9,
        "hint_gb": (after.moved_bytes["hint"] - before.moved_bytes["hint"]) / 1e9,
        "wasted_gb": (after.wasted_bytes - before.wasted_bytes) / 1e9,
    }  # fmt: skip


def start_lines(llm: LLM, report: Report) -> None:
    """The slots, and what the start moved: by warmup nothing."""
    moved = llm.running.built.moe.stats().moved_bytes
    report.put("started", slots=sum(c.slots for c in llm.running.built.moe._caches), **moved)


# ------------------------------------------------------------------------------------------- the parts


@define
class Session:
    """What parts share: a strategy that is filled once, and an engine that is started once."""

    scale: Scale
    report: Report
    rate: float
    directory: Path
    _strategy: Any = None
    _policy: str = ""
    _engine: Any = None
    _open: Any = field(default=None)

    def strategy(self, policy: str = "lfu-decay") -> Any:
        if self._policy != policy:
            self.close()
            self._strategy = OffloadExperts(setup_of(self.scale, slots=self.scale.slots, policy=policy))
            self._policy = policy
            took = seconds(lambda: fill(self.scale, self._strategy))
            self.report.put(f"filled {policy}", s=took, gb_s=self.scale.all_bytes / took / 1e9)
        return self._strategy

    def llm(self) -> LLM:
        if self._engine is None:
            self.close()
            self._open = engine(self.scale, self.directory, "offload", slots=self.scale.slots)
            self._engine = self._open.__enter__()
            start_lines(self._engine, self.report)
        return self._engine  # type: ignore[no-any-return]

    def close(self) -> None:
        """Free the memory of whichever is open: both do not fit every host."""
        self._strategy, self._policy = None, ""
        if self._engine is not None:
            self._engine = None
            self._open.__exit__(None, None, None)
        gc.collect()

    # ------------------------------------------------------------------------------------------- one method a part

    def decode(self, policy: str, zipf: float) -> None:
        for tokens in (1, 16):
            decode_case(self.scale, self.report, self.rate, self.strategy(policy), policy, zipf, tokens)

    def zipf(self) -> None:
        self.decode("lfu-decay", 1.0)

    def uniform(self) -> None:
        self.decode("lfu-decay", 0.0)

    def lru(self) -> None:
        for zipf in (1.0, 0.0):
            decode_case(self.scale, self.report, self.rate, self.strategy("lru"), "lru", zipf, 1)

    def prefill(self) -> None:
        llm = self.llm()
        for turn in range(3):
            for foresee in (True, False):
                name = f"prompt {turn} {'foresee' if foresee else 'plain'}"
                self.report.put(name, **long_prompt(self.scale, llm, self.rate, turn, foresee))

    def beside(self) -> None:
        for turn in range(2):
            self.report.put(f"beside 4 decodes {turn}", **crowded_prompt(self.scale, self.llm()))

    def stream(self) -> None:
        for count in (1, 16):
            self.report.put(f"engine decode x{count}", **streams(self.scale, self.llm(), count, self.rate))

    def check(self) -> None:
        self.close()
        check(self.scale, self.report)

    def tokens(self) -> None:
        wanted = prompts_of(1, self.scale.chunk // 8, self.scale.chunk, self.scale.prompt)
        llm = self.llm()
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in wanted]
        together = [c.token_ids for c in llm.generate(wanted, GREEDY)]
        self.close()
        with engine(self.scale, self.directory, "resident") as resident:
            expected = [resident.generate([prompt], GREEDY)[0].token_ids for prompt in wanted]
        equal = [[a == b for a, b in zip(got, expected, strict=True)] for got in (alone, together)]
        self.report.put("tokens as resident", alone=sum(equal[0]), together=sum(equal[1]), of=len(wanted))
        assert all(equal[0]), "the prompts alone were answered otherwise"

    def chunks(self) -> None:
        self.close()
        with engine(self.scale, self.directory, "offload", slots=self.scale.slots, window_tokens=1) as llm:
            self.report.put("chunk by chunk", **long_prompt(self.scale, llm, self.rate, 0, False))

    def link(self) -> None:
        fetch_rates(self.scale, self.report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit", type=float, default=460.0, help="seconds for all parts")
    parser.add_argument("--part-limit", type=float, default=150.0, help="seconds for one part")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    scale = toy() if given.device == "cpu" else big(given.layers)
    report = Report(given.json, given.limit, given.part_limit)
    torch.set_grad_enabled(False)
    rate = link_rate(scale)
    report.put("copy engine", gb_s=rate / 1e9)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(scale, report, rate, Path(folder) / "model")
        write(scale, session.directory)
        for name in PARTS:
            if name in parts:
                report.part(name, getattr(session, name))
        session.close()
    print("failed:", ", ".join(report.failed) or "nothing")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
