"""Whole models on a GPU: logits, captured steps, compiled keys, and the server's figures. One command, a few minutes.

    python3 benchmarks/gpu_model.py [--parts logits,graphs,cache,serve30,serve36] [--profile] [--json PATH] [--logs DIR]

- ``logits``: bfloat16 logits against transformers in float32, beside those of transformers in bfloat16, for prompts of
  several lengths and for decoding; the largest error and the RMS error may be 1.5 times theirs.
- ``graphs``: a replayed decode step gives the logits and tokens of an eager one, bit for bit.
- ``cache``: after a mix of requests, every key that Triton holds for the device is declared.
- ``serve30``, ``serve36``: ``freetoken serve`` with random weights of Qwen3-30B-A3B's and Qwen3.6-35B-A3B's dimensions:
  seconds to ready, first → again time to first token by prompt length, tokens a second of 1 and of 16 streams.
- ``--profile``: a decode step's kernels (how many a layer, µs each, gaps) and what the host does for each step.

The first three use a few layers of both models with weights from ``make_checkpoint.py``. Every part is a process of its
own; one that fails or takes too long does not stop the others. Exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

KINDS = {"30": "qwen3-30b-a3b", "36": "qwen3.6-35b-a3b"}
CHECKS = ("cache", "graphs", "logits")
PARTS = ("logits", "graphs", "cache", "serve30", "serve36")
CHECK_LAYERS = {"30": 2, "36": 4}
PROFILE_LAYERS = {"30": 8, "36": 8}
MARK = "@@"
SERVE_FLAGS = "--max-seq-len 16384"
LOGIT_LENGTHS = (1, 17, 119, 700, 2047, 3001)


# ------------------------------------------------------------------------------------------- a part, in its process


def emit(kind: str, **fields: Any) -> None:
    """One result for the parent."""
    print(MARK + json.dumps({"kind": kind, **fields}), flush=True)


def attempt(kind: str, do: Callable[[], None]) -> None:
    """``do()``; a failure is a result."""
    try:
        do()
    except Exception as error:
        traceback.print_exc()
        emit(kind, ok=False, error=f"{type(error).__name__}: {error}"[:800])


def engine_options(given: argparse.Namespace) -> dict[str, object]:
    """The options of an engine that leaves room for others on the device."""
    found: dict[str, object] = {
        "device": given.device, "dtype": "bfloat16", "prefix_cache": False, "max_seq_len": given.max_seq_len,
        "max_running_requests": given.lanes, "max_prefill_tokens": given.max_prefill_tokens,
    }  # fmt: skip
    return found if given.device == "cpu" or given.run != "checks" else {**found, "device_memory_bytes": 40 * 10**9}


def run_checks(given: argparse.Namespace) -> None:
    """Cache, graphs and our logits on one engine; then transformers beside it."""
    import torch
    from checkpoint_kinds import KINDS as CONFIGS
    from checkpoint_kinds import with_layers
    from gpu_checks import check_cache, check_graphs, check_logits, our_cases
    from gpu_session import open_session
    from make_checkpoint import make_checkpoint

    directory = given.tmp / f"checks-{given.kind}"
    start = time.perf_counter()
    list(make_checkpoint(with_layers(CONFIGS[given.kind], given.layers), directory, seed=1, device=given.device))
    made = time.perf_counter() - start
    cases = []
    with open_session(directory, **engine_options(given)) as session:
        emit("started", checkpoint_s=round(made, 1), engine_s=round(time.perf_counter() - start - made, 1))
        if "cache" in given.parts:
            attempt("cache", lambda: check_cache(session, emit))
        if "graphs" in given.parts:
            attempt("graphs", lambda: check_graphs(session, emit))
        if "logits" in given.parts:
            lengths = [n for n in LOGIT_LENGTHS if n + 16 <= given.max_seq_len]
            attempt("logits", lambda: cases.extend(our_cases(session, lengths)))
    if cases:
        with torch.inference_mode(False):
            attempt("logits", lambda: check_logits(cases, directory, given.device, emit))


def run_profile(given: argparse.Namespace) -> None:
    """A decode step of 1 and of 16 sequences, and the loop around it."""
    from gpu_profile import profile_decode, profile_host
    from gpu_serve import write_model
    from gpu_session import open_session

    directory = given.tmp / f"profile-{given.kind}"
    write_model(given.kind, directory, given.layers)
    with open_session(directory, load_format="dummy", **engine_options(given)) as session:
        attempt("host", lambda: profile_host(session, emit))
        for count in (1, min(16, given.lanes)):
            attempt("profile", lambda count=count: profile_decode(session, count, 500, emit))  # type: ignore[misc]


def run_serve(given: argparse.Namespace) -> None:
    from gpu_serve import LENGTHS, run_server

    from freetoken.serve.bench.plan import BenchPlan

    longest = given.serve_longest
    plan = BenchPlan(
        lengths=tuple(n for n in LENGTHS if n <= longest), repeats=3, decode_tokens=given.decode_tokens, streams=(16,),
        load_prompt_tokens=min(512, longest), requests=16,
    )  # fmt: skip
    log = given.logs / f"server-{given.kind}.log"
    found = run_server(
        given.kind, given.tmp / f"serve-{given.kind}", log, layers=given.layers, flags=given.serve_flags.split(),
        plan=plan, ready_timeout_s=given.ready_timeout,
    )  # fmt: skip
    emit("serve", ok="error" not in found, **found)


# ------------------------------------------------------------------------------------------- the parent


Take = Callable[[str, dict[str, Any]], None]


class Child:
    """One part's process; its results come as marked lines, everything else goes to a log."""

    def __init__(
        self, name: str, flags: Sequence[str], logs: Path, take: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self.results = 0
        self._take = take
        self._out = self.log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, *flags], stdout=subprocess.PIPE, stderr=self._out, text=True,
            errors="replace", start_new_session=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self.results += 1
                self._take(self.name, json.loads(line.removeprefix(MARK)))
            else:
                self._out.write(line)

    def finish(self, until: float) -> str:
        """Wait until that time at most; says what went wrong, or nothing."""
        try:
            code = self._process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill(signal.SIGTERM)
            code = None
        self.kill(signal.SIGKILL)
        self._reader.join(5)
        self._out.close()
        if code == 0 and self.results:
            return ""
        words = self.log.read_text(errors="replace")[-900:]
        return f"{'ran out of time' if code is None else f'ended with {code}'}; {words}"

    def kill(self, number: signal.Signals) -> None:
        """End the process and what it started; a server that it started has a session of its own and its own end."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                return


class Report:
    """Prints results as they come, and keeps them."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def take(self, part: str, result: dict[str, Any]) -> None:
        with self._lock:
            self.results.append({"part": part, **result})
            print("\n".join(show(part, result)), flush=True)

    def fail(self, part: str, why: str) -> None:
        self.take(part, {"kind": "failed", "ok": False, "error": why})

    @property
    def bad(self) -> list[str]:
        return [f"{r['part']}:{r['kind']}:{r.get('case', '')}" for r in self.results if r.get("ok") is False]


def show(part: str, result: Mapping[str, Any]) -> list[str]:
    """A result in one line, a profile in as many as it has rows."""
    kind = result["kind"]
    mark = {True: "ok  ", False: "FAIL"}.get(result.get("ok"), "    ")  # type: ignore[arg-type]
    if result.get("error") and kind != "serve":
        return [f"{mark} {part} {kind}: {result['error']}"]
    if kind == "logits":
        r = result
        errors = f"max {r['max']:.4f} ×{r['max_ratio']:.2f} rms {r['rms']:.5f} ×{r['rms_ratio']:.2f}"
        rest = f"row ×{r['median_row_ratio']:.2f} top1 {r['top1']:.3f}/{r['top1_theirs']:.3f}"
        return [f"{mark} {part} {r['case']:18} {r['rows']:4} rows {errors} {rest}"]
    if kind == "profile":
        head = {k: v for k, v in result.items() if k not in ("rows", "kind")}
        rows = result.get("rows", [])[: 25 if result["sequences"] == 1 else 4]
        lines = [
            f"{n:57} {c:7.2f}/step {us:8.2f} us {total:9.1f} us/step {100 * x:5.1f} %" for n, c, us, total, x in rows
        ]
        return [f"     {part} {json.dumps(head)}", *lines]
    if kind == "host":
        times = result["ms_a_step"].items()
        lines = [f"     {label:28} {ms:8.4f} ms/step  {calls} calls" for label, (ms, calls) in times]
        return [f"     {part} host: {result['steps']} steps, {result['wall_ms_a_token']} ms a token", *lines]
    rest = {k: v for k, v in result.items() if k not in ("kind", "ok")}
    return [f"{mark} {part} {kind} {json.dumps(rest, ensure_ascii=False)}"]


def flags_of(given: argparse.Namespace, run: str, key: str, layers: int | None) -> list[str]:
    """A child's command line."""
    kind = given.kinds.get(key, key)
    found = [
        "--run", run, "--kind", kind, "--parts", ",".join(given.parts), "--device", given.device, "--tmp",
        str(given.tmp), "--logs", str(given.logs), "--serve-flags", given.serve_flags, "--max-seq-len",
        str(given.max_seq_len), "--lanes", str(given.lanes), "--max-prefill-tokens", str(given.max_prefill_tokens),
        "--serve-longest", str(given.serve_longest), "--decode-tokens", str(given.decode_tokens),
        "--ready-timeout", str(given.ready_timeout),
    ]  # fmt: skip
    return [*found, "--layers", str(layers)] if layers else found


def run_all(given: argparse.Namespace) -> int:
    report, start = Report(), time.monotonic()
    end = start + given.deadline
    given.tmp.mkdir(parents=True, exist_ok=True)
    given.logs.mkdir(parents=True, exist_ok=True)

    def children(named: Sequence[tuple[str, list[str]]], together: bool) -> None:
        for group in [named] if together else [[one] for one in named]:
            if time.monotonic() > end - 10:
                for name, _ in group:
                    report.fail(name, "skipped: no time left (--deadline)")
                continue
            running = [Child(name, flags, given.logs, report.take) for name, flags in group]
            for child in running:
                why = child.finish(end)
                if why:
                    report.fail(child.name, why)

    if set(CHECKS) & set(given.parts):
        named = [(f"checks{k}", flags_of(given, "checks", k, given.check_layers.get(k))) for k in given.kinds]
        children(named, not given.sequential)
    served = [k for k in given.kinds if f"serve{k}" in given.parts]
    children([(f"serve{k}", flags_of(given, "serve", k, given.serve_layers)) for k in served], False)
    if given.profile:
        layers = {k: given.profile_layers.get(k) for k in given.kinds}
        children([(f"profile{k}", flags_of(given, "profile", k, layers[k])) for k in given.kinds], False)
    seconds = round(time.monotonic() - start, 1)
    if given.json:
        given.json.write_text(json.dumps({"seconds": seconds, "results": report.results}, indent=1))
    print(f"{len(report.results)} results, {len(report.bad)} bad {report.bad[:12]}, {seconds} s")
    return int(bool(report.bad))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: tuple(p for p in text.split(",") if p), default=PARTS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/freetoken-gpu-model/logs"))
    parser.add_argument("--tmp", type=Path, default=Path("/tmp/freetoken-gpu-model"), help="for made-up checkpoints")
    parser.add_argument("--deadline", type=float, default=235.0, help="seconds for everything")
    parser.add_argument("--sequential", action="store_true", help="check one model after the other")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--serve-flags", default=SERVE_FLAGS, help="further flags of freetoken serve")
    parser.add_argument("--serve-layers", type=int, help="instead of the published number")
    parser.add_argument("--full-profile", action="store_true", help="profile all layers instead of 8")
    parser.add_argument("--only", choices=list(KINDS), help="only this model")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--max-prefill-tokens", type=int, default=2048)
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--serve-longest", type=int, default=12_691)
    parser.add_argument("--decode-tokens", type=int, default=256)
    parser.add_argument("--ready-timeout", type=float, default=150.0)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself on any machine")
    parser.add_argument("--run", choices=("checks", "serve", "profile"), help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    given.kinds = {"30": "tiny-qwen3-moe", "36": "tiny-qwen3.6-moe"} if given.tiny else dict(KINDS)
    if given.only:
        given.kinds = {given.only: given.kinds[given.only]}
    given.check_layers = {} if given.tiny else CHECK_LAYERS
    given.profile_layers = {} if given.tiny or given.full_profile else PROFILE_LAYERS
    return given


def main() -> int:
    given = parse()
    if given.run is None:
        return run_all(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server which this part started is ended too
    {"checks": run_checks, "serve": run_serve, "profile": run_profile}[given.run](given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
