"""FlashInfer's attention on a GPU: built, checked for every declared capability, and timed against our Triton kernels.

    PYTHONPATH=core/src:plugins/attention_triton/src:plugins/attention_flashinfer/src \\
        python3 benchmarks/gpu_flashinfer.py [--seconds 460] [--parts build,checks,…] [--json PATH]

Add the folder of FlashInfer to PYTHONPATH where it is not installed. Parts, each in processes of their own, so that one
that crashes or hangs leaves the others their time:

- ``build``: the modules, several at once, each with its seconds; checks run while later modules are still being built.
- ``checks``: the attention conformance suite for every dtype × head size, eager and in captured graphs.
- ``claims``: what the library says its plans need, against what the backend claims.
- ``first``: the first launch after the warmup's loading, against the next ones.
- ``times``: prefill and decode at 1, 16, 64 sequences and 1k, 16k, 128k context, both backends on the same tensors,
  with the roof; FlashInfer's kernels for Hopper beside its others; and the host's share.

A table on standard output; the JSON file is written anew after each part.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "tests" / "plugins" / "attention_flashinfer" / "test_device.py"
ROOF_FLOPS = 805e12  # bfloat16, 8192³, on one H200
ROOF_BYTES = 4.27e12  # device copy on one H200
PARTS = ("build", "checks", "claims", "first", "times")
PAGE = 16
STEP_TOKENS = 8192
LAST_SECONDS = 200  # kept for the parts after the builds, whatever builds are still running

Row = dict[str, Any]
Module = tuple[str, str, int]

MODULES: tuple[Module, ...] = (
    ("fa2", "bfloat16", 128),  # the first three are timed
    ("fa3", "bfloat16", 128),
    ("fa2", "bfloat16", 256),
    ("fa2", "bfloat16", 64),
    ("fa2", "float16", 128),
    ("fa2", "float16", 64),
    ("fa2", "float16", 256),
)


@frozen
class Model:
    """The attention of a published model."""

    name: str
    q_heads: int
    kv_heads: int
    dim: int


MODELS = (Model("qwen3-30b-a3b", 32, 4, 128), Model("qwen3.6-35b-a3b", 16, 2, 256))
POINTS = tuple(product((1, 16, 64), (1024, 16_384, 131_072)))  # sequences × context


# ------------------------------------------------------------------------------------------------ the run as a whole


@define
class Report:
    """What has been found so far; written after each addition."""

    path: Path | None
    started: float = field(factory=time.time)
    parts: dict[str, list[Row]] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)

    def add(self, part: str, rows: Sequence[Row]) -> None:
        with self.lock:
            self.parts.setdefault(part, []).extend(rows)
            for row in rows:
                print(f"[{time.time() - self.started:5.0f} s] {part}: {words(row)}", flush=True)
            if self.path is not None:
                self.path.write_text(json.dumps(self.as_json(), indent=1))

    def as_json(self) -> Row:
        return {
            "seconds": round(time.time() - self.started, 1), "roof_flops": ROOF_FLOPS, "roof_bytes": ROOF_BYTES,
            **self.parts,
        }  # fmt: skip


def words(row: Mapping[str, Any]) -> str:
    return "  ".join(str(value) if key == "case" else f"{key} {value}" for key, value in row.items())


def run_child(command: Sequence[str], until: float, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and the end of what it said; everything it started is killed at ``until`` (code −1)."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=max(1.0, until - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return -1, "out of time\n" + said[-1500:]
    return process.returncode, said[-1500:]


def toolchain() -> Row:
    """Variables that lead nvcc to what a partial toolkit lacks: the driver's library, to link with, and headers that
    came with torch's own packages. Sets them for this process and its children, and says which."""
    compiler = shutil.which("nvcc")
    home = Path(os.environ.get("CUDA_HOME") or (Path(compiler).parents[1] if compiler else "/usr/local/cuda"))
    found: Row = {"cuda": str(home), "nvcc": compiler or "not on the path"}
    if not any((home / "lib64" / place / "libcuda.so").exists() for place in ("", "stubs")):
        places = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib",
                  "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]  # fmt: skip
        driver = next((Path(p) / "libcuda.so.1" for p in places if p and (Path(p) / "libcuda.so.1").exists()), None)
        if driver is not None:
            folder = Path(tempfile.mkdtemp(prefix="libcuda-"))
            (folder / "libcuda.so").symlink_to(driver)
            found["LIBRARY_PATH"] = _prepend("LIBRARY_PATH", folder)
    if not (home / "include" / "curand_kernel.h").exists():
        headers = next((p.parent for s in sys.path for p in Path(s).glob("nvidia/*/include/curand_kernel.h")), None)
        if headers is not None:
            found["CPATH"] = _prepend("CPATH", headers)
    return found


def _prepend(variable: str, folder: Path) -> str:
    os.environ[variable] = os.pathsep.join(filter(None, (str(folder), os.environ.get(variable, ""))))
    return os.environ[variable]


def build(module: Module, until: float, jobs: int) -> Row:
    """Build one module the way the warmup does, in its child."""
    started = time.time()
    command = [sys.executable, "-m", "freetoken_attention_flashinfer.build", module[0], module[1], str(module[2])]
    code, said = run_child(command, until, {"MAX_JOBS": str(jobs)})
    row: Row = {"case": " ".join(map(str, module)), "seconds": round(time.time() - started, 1)}
    return row if code == 0 else {**row, "failed": said[-600:]}


def check(dtype: str, dim: int, until: float) -> Row:
    """The conformance suite at one dtype and head size."""
    case = f"{dtype} d{dim}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.xml"
        code, said = run_child(
            [sys.executable, "-m", "pytest", str(SUITE), "-k", f"cuda-{dtype}-d{dim}", "-p", "no:cacheprovider",
             f"--junitxml={file}"],
            until,
        )  # fmt: skip
        if not file.exists():
            return {"case": case, "failed": f"exit code {code}: {said[-600:]}"}
        suite = ElementTree.parse(file).getroot().find("testsuite")
        assert suite is not None
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        row: Row = {"case": case, **counts, "seconds": round(float(suite.get("time", 0)), 1)}
        if code == 0 and counts["skipped"] < counts["tests"]:
            return row
        return {**row, "failed": said[-600:] if code else "all were skipped: is there a device?"}


def child(part: str, until: float, report: Report) -> None:
    """One of the parts at the end of this file, in its own process; its rows come by file as they are found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        code, said = run_child(
            [sys.executable, __file__, "--child", part, "--rows", str(file), "--until", str(until)], until
        )
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if code != 0:
            rows.append({"case": part, "failed": f"exit code {code}: {said[-600:]}"})
        report.add(part, rows)


def build_and_check(report: Report, parts: Sequence[str], until: float) -> None:
    """Build three modules at a time; check each dtype and head size once its module is there, one at a time."""
    jobs = max(2, (os.cpu_count() or 2) // 2)
    with ThreadPoolExecutor(3) as builders, ThreadPoolExecutor(1) as checker:
        checks: list[Future[None]] = []

        def one(module: Module) -> None:
            row = build(module, until, jobs)
            report.add("build", [row])
            kernel, dtype, dim = module
            if kernel == "fa2" and "checks" in parts and "failed" not in row:
                checks.append(checker.submit(lambda: report.add("checks", [check(dtype, dim, until)])))

        for done in [builders.submit(one, module) for module in MODULES]:
            done.result()
        for checked in checks:
            checked.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", default="")
    parser.add_argument("--child", default="")
    parser.add_argument("--rows", default="")
    parser.add_argument("--until", type=float, default=0.0)
    options = parser.parse_args()
    if options.child:
        return as_child(options.child, Path(options.rows), options.until)
    parts = options.parts.split(",")
    report = Report(Path(options.json) if options.json else None)
    until = report.started + options.seconds
    report.add("build", [{"case": "toolchain", **toolchain()}])
    before_times = until - (LAST_SECONDS if "times" in parts else 0)
    triton = threading.Thread(target=child, args=("triton", before_times, report), daemon=True)
    if "times" in parts:
        triton.start()
    if "build" in parts:
        build_and_check(report, parts, before_times)
    elif "checks" in parts:
        for dtype, dim in product(("bfloat16", "float16"), (64, 128, 256)):
            report.add("checks", [check(dtype, dim, before_times)])
    if "times" in parts:
        triton.join()
    for part in ("claims", "first", "times"):
        if part in parts:
            child(part, until if part == "times" else min(until, time.time() + 45), report)
    print_table(report.parts.get("times", []))
    failures = [row for rows in report.parts.values() for row in rows if any(key.endswith("failed") for key in row)]
    print(f"{sum(map(len, report.parts.values()))} results, {len(failures)} failures, {report.as_json()['seconds']} s")
    return 1 if failures else 0


def print_table(rows: Sequence[Row]) -> None:
    """Milliseconds, and the share of the roof, of each backend."""
    timed = [row for row in rows if "roof_ms" in row]
    if not timed:
        return
    contenders = ("triton", "flashinfer", "flashinfer fa3")
    print("\n| step | roof | " + " | ".join(contenders) + " | flashinfer ÷ triton speed |")
    print("| --- | --- |" + " --- |" * (len(contenders) + 1))
    for row in timed:
        cells = []
        for name in contenders:
            ms = row.get(name)
            cells.append(f"{ms:.4g} ms ({row['roof_ms'] / ms:.2f})" if isinstance(ms, float) else "")
        both = [row.get(name) for name in contenders[:2]]
        faster = f"{both[0] / both[1]:.2f}" if all(isinstance(ms, float) for ms in both) else ""
        print(f"| {row['case']} | {row['roof_ms']:.4g} ms | " + " | ".join(cells) + f" | {faster} |")
    for phase in ("prefill", "decode"):
        for name in contenders[1:]:
            ratios = [r["triton"] / r[name] for r in timed if phase in r["case"] and name in r and "triton" in r]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                print(f"{phase}: {name} is {mean:.2f} times as fast as triton (geometric mean of {len(ratios)})")
    print()


# ------------------------------------------------------------------------------------------------ parts in a child


def as_child(part: str, file: Path, until: float) -> int:
    """Run one part; every row is written as soon as it is found."""
    with file.open("w") as out:
        for case, call in CHILDREN[part]():
            if time.time() > until - 5:
                row: Row = {"case": case, "skipped": "out of time"}
            else:
                try:
                    row = {"case": case, **call()}
                except Exception as error:
                    traceback.print_exc(limit=4)
                    row = {"case": case, "failed": f"{type(error).__name__}: {error}"[:400]}
            out.write(json.dumps(row) + "\n")
            out.flush()
    return 0


Calls = Iterator[tuple[str, Callable[[], Row]]]


def triton_part() -> Calls:
    """All Triton kernels of the run, compiled in worker processes beside FlashInfer's builds."""
    yield "compile", compile_triton


def compile_triton() -> Row:
    from freetoken.ops.triton_stub import Target, compile_request
    from freetoken.testing.fakes import make_device
    from freetoken.vocab.launch import StepPoint, TritonLaunch
    from freetoken.warmup.compile_worker import compile_requests
    from freetoken_attention_triton.launches import launches
    from freetoken_attention_triton.shape import attention_shape

    device = make_device("cuda")
    requests = {}
    for model in MODELS:
        shape = attention_shape(setup(model, device))
        for sequences, context in POINTS:
            query = step_query(sequences, context)
            for point in (
                StepPoint(query * sequences, sequences, query, context, sequences, False),
                StepPoint(sequences, sequences, 1, context, sequences, True),
            ):
                for launch in launches(point, shape, device):
                    assert isinstance(launch, TritonLaunch)
                    request = compile_request(launch, Target.of(device))
                    requests[request.key] = request
    return {"result": str(compile_requests(list(requests.values()), max(2, (os.cpu_count() or 2) // 4)))}


def claims_part() -> Calls:
    """The library's own answer against ours, at the steps that are timed and at ragged ones."""
    for model in MODELS:
        yield f"{model.name} claims", lambda model=model: claims(model)


def claims(model: Model) -> Row:
    import numpy as np
    import torch

    from freetoken.testing.fakes import make_device
    from freetoken_attention_flashinfer import library
    from freetoken_attention_flashinfer.pages import page_index
    from freetoken_attention_flashinfer.workspace import Sizes

    sizes = Sizes.of(setup(model, make_device("cuda")))
    rng = np.random.default_rng(0)
    batches = [((step_query(s, c),) * s, (c - step_query(s, c),) * s) for s, c in POINTS]
    for _ in range(40):
        count = int(rng.integers(1, 65))
        batches.append((tuple(rng.integers(1, 300, count).tolist()), tuple(rng.integers(0, 20_000, count).tolist())))
    tight = [0.0, 0.0]
    scratch = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    for query_lens, prefix_lens in batches:
        index = page_index(query_lens, prefix_lens, PAGE, 1 << 14)
        host = [torch.from_numpy(a) for a in (index.query_starts, index.page_starts, index.last_page_tokens)]
        ids = torch.zeros(index.num_pages, dtype=torch.int32, device="cuda")
        wrapper = library.eager_wrapper("fa2", scratch, scratch)
        floats, ints = wrapper.workspace_size(
            host[0], host[1], ids, host[2], model.q_heads, model.kv_heads, model.dim, PAGE, causal=True,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        ours = (sizes.float_bytes(), sizes.int_bytes(sum(query_lens), len(query_lens)))
        assert floats <= ours[0], f"{floats} float bytes, {ours[0]} claimed, for {query_lens}, {prefix_lens}"
        assert ints <= ours[1], f"{ints} int bytes, {ours[1]} claimed, for {query_lens}, {prefix_lens}"
        tight = [max(tight[0], floats / ours[0]), max(tight[1], ints / ours[1])]
    return {"steps": len(batches), "floats used at most": round(tight[0], 3), "ints": round(tight[1], 3)}


def first_part() -> Calls:
    """The first step of each kind in a fresh process, after the warmup's loading and nothing else."""
    from freetoken_attention_flashinfer.touch import touch

    model = MODELS[0]
    yield "load and touch fa2 bfloat16 128", lambda: timed_once(lambda: touch("fa2", "bfloat16", 128, "cuda:0"))
    for query_lens, prefix_lens in (
        ((1,), (900,)), ((15,), (0,)), ((17,), (5,)), ((119,), (0,)), ((2048,), (0,)), ((40,), (12_660,)),
        ((1,) * 16, (1000,) * 16), ((300, 1, 1), (0, 50, 9000)),
    ):  # fmt: skip
        name = f"first step: {sum(query_lens)} tokens in {len(query_lens)}, context {query_lens[0] + prefix_lens[0]}"
        yield name, lambda q=query_lens, p=prefix_lens: first_touch(model, q, p)


def timed_once(call: Callable[[], object]) -> Row:
    started = time.perf_counter()
    call()
    return {"seconds": round(time.perf_counter() - started, 2)}


def first_touch(model: Model, query_lens: tuple[int, ...], prefix_lens: tuple[int, ...]) -> Row:
    import torch

    from freetoken.testing.fakes import make_batch

    attention = make("flashinfer", model)
    batch = make_batch(query_lens, prefix_lens, PAGE, device="cuda")
    pools = [torch.zeros(int(batch.page_table.max()) + 1, PAGE, model.kv_heads, model.dim, dtype=torch.bfloat16,
                         device="cuda") for _ in "kv"]  # fmt: skip
    q = torch.zeros(batch.num_tokens, model.q_heads, model.dim, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    times = []
    for _ in range(4):
        started = time.perf_counter()
        attention.forward(q, *pools, 0, attention.plan(batch))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    most = max(times[1:])
    return {"first_ms": round(times[0], 3), "next_ms": round(most, 3), "late": times[0] - most > max(0.15 * most, 5.0)}


def times_part() -> Calls:
    """Decode first, which is short; then prefill; then the host's share."""
    for model in MODELS:
        for sequences, context in POINTS:
            name = f"{model.name} decode {sequences} × {context}"
            yield name, lambda m=model, s=sequences, c=context: decode(m, s, c)
        for sequences, context in POINTS:
            query = step_query(sequences, context)
            name = f"{model.name} prefill {sequences} × {query} after {context - query}"
            yield name, lambda m=model, s=sequences, c=context: prefill(m, s, step_query(s, c), c)
        yield f"{model.name} prefill 1 × 12700 after 0", lambda m=model: prefill(m, 1, 12_700, 12_700)
        for sequences in (1, 16, 64):
            yield f"{model.name} host µs, {sequences} sequences", lambda m=model, s=sequences: host_share(m, s)


def step_query(sequences: int, context: int) -> int:
    """New tokens of each sequence in a step of at most ``STEP_TOKENS``."""
    return min(context, STEP_TOKENS // sequences)


def setup(model: Model, device: Any) -> Any:
    from freetoken.plugin.protocols import AttentionLimits, AttentionSetup
    from freetoken.vocab.cache_spec import PagedKV
    from freetoken.vocab.model_spec import AttentionGroup

    cache = PagedKV(model.kv_heads, model.dim, model.dim, "bfloat16")
    group = AttentionGroup("group", (0,), model.q_heads, cache, model.dim**-0.5)
    return AttentionSetup(group, device, "bfloat16", AttentionLimits(PAGE, 131_072, 64, 12_700))


def make(name: str, model: Model) -> Any:
    """A backend by its name in the tables; ``flashinfer fa3`` is FlashInfer with its kernels for Hopper let in."""
    from freetoken.testing.fakes import make_device

    device = make_device("cuda")
    if name == "triton":
        from freetoken_attention_triton.spec import SPEC as TRITON

        return TRITON.create(setup(model, device))
    from freetoken_attention_flashinfer import kernels
    from freetoken_attention_flashinfer.spec import SPEC as FLASHINFER

    before = kernels.FA3_ARCHS
    kernels.FA3_ARCHS = frozenset({device.arch}) if name.endswith("fa3") else before
    try:
        return FLASHINFER.create(setup(model, device))
    finally:
        kernels.FA3_ARCHS = before


def is_built(kernel: str, dim: int) -> bool:
    """Whether a module is there already, so that no timing waits for its build."""
    import torch
    from flashinfer.jit.attention import gen_batch_prefill_module

    from freetoken_attention_flashinfer.library import module_facts

    return bool(gen_batch_prefill_module(kernel, *module_facts(torch.bfloat16, dim)).is_compiled)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The median of ``repeats`` timings by CUDA events, after two warm calls."""
    import torch

    for _ in range(2):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def measure(contenders: Sequence[str], call: Callable[[str], tuple[float, Any]], roof_ms: float) -> Row:
    """Each contender's milliseconds; results are compared with the first's. One that fails leaves the others alone."""
    row: Row = {"roof_ms": round(roof_ms, 6)}
    first = None
    for name in contenders:
        try:
            ms, out = call(name)
            row[name] = round(ms, 6)
            if first is None:
                first = out
            else:
                row[f"{name} differs"] = float(f"{float((out - first).abs().max()):.2e}")
        except Exception as error:
            traceback.print_exc(limit=4)
            row[f"{name} failed"] = f"{type(error).__name__}: {error}"[:300]
    return row


def prefill(model: Model, sequences: int, query: int, context: int) -> Row:
    import torch

    from freetoken.testing.fakes import make_batch

    torch.cuda.empty_cache()
    batch = make_batch((query,) * sequences, (context - query,) * sequences, PAGE, device="cuda", contiguous=True)
    shape = (int(batch.page_table.max()) + 1, PAGE, model.kv_heads, model.dim)
    k_pool, v_pool = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in "kv")
    q = torch.randn(batch.num_tokens, model.q_heads, model.dim, dtype=torch.bfloat16, device="cuda")
    prefix = context - query
    flops = sequences * 4 * model.q_heads * model.dim * (query * prefix + query * (query + 1) // 2)
    moved = sequences * (context * model.kv_heads + query * model.q_heads) * model.dim * 4
    contenders = ["triton", "flashinfer"]
    if is_built("fa3", model.dim):
        contenders.append("flashinfer fa3")

    def call(name: str) -> tuple[float, Any]:
        attention = make(name, model)
        plan = attention.plan(batch)
        ms = milliseconds(lambda: attention.forward(q, k_pool, v_pool, 0, plan), 5)
        return ms, attention.forward(q, k_pool, v_pool, 0, plan)

    row = measure(contenders, call, max(flops / ROOF_FLOPS, moved / ROOF_BYTES) * 1e3)
    return {**row, "tflop": round(flops / 1e12, 3)}


def decode(model: Model, sequences: int, context: int) -> Row:
    """Enough layers' pools in one graph that nothing is read from the second-level cache twice."""
    import torch

    from freetoken.testing.fakes import make_batch

    torch.cuda.empty_cache()
    batch = make_batch((1,) * sequences, (context - 1,) * sequences, PAGE, device="cuda")
    moved = sequences * context * model.kv_heads * model.dim * 2 * 2
    layers = max(1, min(48, math.ceil(300e6 / moved)))
    shape = (int(batch.page_table.max()) + 1, PAGE, model.kv_heads, model.dim)
    pools = [
        tuple(torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in "kv") for _ in range(layers)
    ]
    q = torch.randn(sequences, model.q_heads, model.dim, dtype=torch.bfloat16, device="cuda")

    def call(name: str) -> tuple[float, Any]:
        attention = make(name, model)
        attention.reserve_graph(setup(model, None).limits)
        plan = attention.plan_capture(batch)

        def step() -> Any:
            out = None
            for pair in pools:
                out = attention.forward(q, *pair, 0, plan)
            return out

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        attention.plan_replay(plan, batch)
        ms = milliseconds(graph.replay, 10) / layers
        return ms, out.clone()

    return measure(("triton", "flashinfer"), call, moved / ROOF_BYTES * 1e3)


def host_share(model: Model, sequences: int) -> Row:
    """Microseconds of the host: planning a replay, and planning and launching an eager step."""
    import torch

    from freetoken.testing.fakes import make_batch

    batch = make_batch((1,) * sequences, (1023,) * sequences, PAGE, device="cuda")
    shape = (int(batch.page_table.max()) + 1, PAGE, model.kv_heads, model.dim)
    pools = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    q = torch.zeros(sequences, model.q_heads, model.dim, dtype=torch.bfloat16, device="cuda")
    row: Row = {}
    for name in ("triton", "flashinfer"):
        attention = make(name, model)
        attention.reserve_graph(setup(model, None).limits)
        captured, plan = attention.plan_capture(batch), attention.plan(batch)
        for what, call in (
            ("replay", lambda a=attention, c=captured: a.plan_replay(c, batch)),
            ("plan", lambda a=attention: a.plan(batch)),
            ("forward", lambda a=attention, p=plan: a.forward(q, *pools, 0, p)),
        ):
            row[f"{name} {what}"] = round(host_us(call), 1)
    return row


def host_us(call: Callable[[], object], repeats: int = 100) -> float:
    import torch

    for _ in range(10):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return spent / repeats * 1e6


CHILDREN: Mapping[str, Callable[[], Calls]] = {
    "triton": triton_part, "claims": claims_part, "first": first_part, "times": times_part,
}  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main())
