"""Check and time every Triton op kernel on a GPU: a table on standard output, and JSON with ``--json PATH``.

    python3 benchmarks/gpu_kernels.py [--only OP …] [--no-check] [--no-time] [--sweep] [--variants] [--json PATH]

First each op against its float32 reference: bfloat16 and float16, odd sizes, outputs poisoned before the kernel runs.
Then its time at the shapes of Qwen3-30B-A3B and Qwen3.6-35B-A3B against its roof, inside a CUDA graph and over operands
that exceed the second-level cache. ``--sweep`` times other tiles beside the table's; ``--variants`` times nothing but
the named tables for one token (``PAIR_VARIANTS``, ``GEMV_VARIANTS``). A case that fails does not stop
the others. Keys are compiled beforehand in worker processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attrs import asdict, evolve, field, frozen

sys.path.insert(0, str(Path(__file__).parent))

from compile_all import MODELS, declared, model_shapes

from freetoken.ops.reference import REFERENCE
from freetoken.ops.triton_stub import Target, compile_request
from freetoken.plugin.protocols import KernelSetup
from freetoken.testing.fakes import make_device
from freetoken.testing.op_cases import OP_CASES
from freetoken.vocab.launch import TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken.warmup.compile_worker import compile_requests
from freetoken.warmup.enumerate import enumerate_keys
from freetoken_kernels_triton import experts, experts_tiles, gated_delta, linear
from freetoken_kernels_triton.spec import SPECS
from freetoken_kernels_triton.tiles import GemmTile

ROOF_BYTES = 4.27e12
ROOF_FLOPS = 805e12
FLUSH_BYTES = 512 << 20
DEVICE = make_device("cuda")
CUDA = torch.device("cuda")

Call = Callable[[], Any]


@frozen
class Check:
    """One comparison: the largest and the mean square difference, and the bound that both must keep."""

    name: str
    max_error: float
    rms_error: float
    bound: float

    @property
    def good(self) -> bool:
        return self.max_error <= self.bound  # False for NaN


@frozen
class Timing:
    """One time against its roof. ``library_us`` is what the library takes for the same, where it does."""

    name: str
    tokens: int
    us: float
    roof_us: float
    library_us: float | None = None

    @property
    def share(self) -> float:
        return self.roof_us / self.us


@frozen
class Report:
    """Everything found; failures are texts."""

    checks: list[Check] = field(factory=list)
    timings: list[Timing] = field(factory=list)
    failures: list[str] = field(factory=list)

    def attempt(self, what: str, do: Callable[[], None]) -> None:
        """``do()``, its failure noted instead of raised."""
        try:
            do()
            torch.cuda.synchronize()
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
            traceback.print_exc(limit=4)

    def show_check(self, check: Check) -> None:
        self.checks.append(check)
        mark = "ok  " if check.good else "FAIL"
        print(f"{mark} {check.name:70} max {check.max_error:.2e} rms {check.rms_error:.2e} bound {check.bound:.1e}")

    def show_timing(self, timing: Timing) -> None:
        self.timings.append(timing)
        library = f"   library {timing.library_us:9.1f}" if timing.library_us is not None else ""
        print(
            f"{timing.name:58} {timing.tokens:6d} {timing.us:10.1f} us   roof {timing.roof_us:9.1f} "
            f"{100 * timing.share:5.0f} %{library}",
            flush=True,
        )


def load(shape: OpShape) -> Callable[..., Any]:
    """The call of this plugin's kernel for ``shape``, with nothing remembered from other tiles."""
    spec = next(s for s in SPECS if s.op == shape.op)
    served = spec.serves(shape)
    assert served, served.reason
    return spec.load(KernelSetup(shape, DEVICE, shape.dtype, lambda stored: stored.parts["data"].float())).call


def randn(*shape: int, dtype: str = "bfloat16", scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=CUDA) * scale).to(getattr(torch, dtype))


# ------------------------------------------------------------------------------------------------ inputs


def heads(tokens: int, count: int, dim: int, dtype: str) -> torch.Tensor:
    """``[T, count, dim]``, a column range of wider rows."""
    return randn(tokens, 2 * count * dim, dtype=dtype)[:, : count * dim].view(tokens, count, dim)


def where(lengths: Sequence[int], prefix: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = torch.tensor([0, *lengths], device=CUDA).cumsum(0).to(torch.int32)
    slots = torch.randperm(len(lengths) + 3, device=CUDA)[: len(lengths)]
    return starts, slots, torch.tensor(prefix, dtype=torch.int32, device=CUDA)


def ragged(tokens: int, sequences: int) -> list[int]:
    """``sequences`` uneven lengths that sum to ``tokens``."""
    if tokens == sequences:
        return [1] * tokens
    lengths = [1 + (tokens - sequences) * (i + 1) * 2 // (sequences * (sequences + 1)) for i in range(sequences)]
    lengths[-1] += tokens - sum(lengths)
    return lengths


def table(rotary: int, rows: int = 4096) -> torch.Tensor:
    angles = torch.arange(rows, device=CUDA).unsqueeze(1) * 1e6 ** (-torch.arange(0, rotary, 2, device=CUDA) / rotary)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def routing(tokens: int, shape: OpShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and slots of uniform routing."""
    scores = torch.rand(tokens, shape.experts, device=CUDA)
    slots = scores.topk(shape.top_k, dim=-1).indices.to(torch.int32)
    return torch.rand(tokens, shape.top_k, device=CUDA), slots


def bank(shape: OpShape) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Experts as this plugin packs them, and as the reference does."""
    slots, hidden, inner = shape.experts, shape.cols, shape.intermediate
    gate = randn(slots, inner, hidden, dtype=shape.dtype, scale=hidden**-0.5)
    up = randn(slots, inner, hidden, dtype=shape.dtype, scale=hidden**-0.5)
    down = randn(slots, hidden, inner, dtype=shape.dtype, scale=inner**-0.5)
    mixed = torch.stack((gate, up), 2).reshape(slots, 2 * inner, hidden)
    return {"gate_up": mixed, "down": down}, {"gate_up": torch.cat((gate, up), 1), "down": down}


def delta_inputs(tokens: int, sequences: int, shape: OpShape) -> tuple[Any, ...]:
    hk, hv, dk, dv = shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_dim
    kind = getattr(torch, shape.dtype)
    q, k = (F.normalize(torch.randn(tokens, hk, dk, device=CUDA), dim=-1).to(kind) for _ in range(2))
    v = heads(tokens, hv, dv, shape.dtype)
    decay = -F.softplus(torch.randn(tokens, hv, device=CUDA) - 2)
    beta = torch.sigmoid(torch.randn(tokens, hv, device=CUDA))
    state = torch.randn(sequences + 3, hv, dk, dv, device=CUDA)
    return (q, k, v, decay, beta, state, *where(ragged(tokens, sequences), [i % 3 for i in range(sequences)]))


def sampling_rows(rows: int, vocab: int, flat: bool = False, **settings: float) -> tuple[torch.Tensor, ...]:
    """Logits with a long tail (or nearly flat), and the same settings for every row."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    logits = torch.randn(rows, vocab, device=CUDA) * (1.0 if flat else 3.0)
    columns = [
        torch.full((rows,), value, device=CUDA, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in given.items()
    ]
    seeds = torch.randint(-(2**62), 2**62, (rows,), device=CUDA)
    return (logits, *columns, seeds, torch.arange(rows, device=CUDA))


# ------------------------------------------------------------------------------------------------ checks


def wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    return {k: wide(v) for k, v in value.items()} if isinstance(value, dict) else value


def compare(report: Report, name: str, got: Any, want: Any, factor: float, unit: float) -> None:
    """Every tensor of a result; ``unit`` is the unit roundoff of the dtype, ``factor`` how many may accumulate."""
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        error = (g.double() - w.double()).abs()
        size = float(w.double().abs().max()) if w.numel() else 1.0
        label = name if len(got) == 1 else f"{name} [{index}]"
        largest = float(error.max()) if not torch.isnan(error).any() else float("nan")
        report.show_check(Check(label, largest, float(error.square().mean().sqrt()), factor * unit * max(size, 1e-3)))


def check(report: Report, shape: OpShape, args: tuple[Any, ...], label: str, factor: float, **more: Any) -> None:
    """The kernel on ``args`` against the reference in float32 on the same, in-place arguments included.

    ``reference_args`` replaces the reference's arguments, ``in_place`` lists positions to compare afterwards.
    """
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}[shape.dtype]
    reference_args = [
        x.clone() if isinstance(x, torch.Tensor) else x for x in map(wide, more.get("reference_args", args))
    ]
    name = f"{shape.op} {shape.dtype} {label}"

    def run() -> None:
        poison(True)
        got = load(shape)(*args)
        torch.cuda.synchronize()
        poison(False)
        want = REFERENCE[shape.op](*reference_args)
        if got is not None:
            compare(report, name, got, want, factor, unit)
        for place in more.get("in_place", ()):
            compare(report, f"{name} argument {place}", args[place], reference_args[place], factor, unit)

    report.attempt(name, run)
    poison(False)


def poison(on: bool) -> None:
    """Whatever ``torch.empty`` gives is NaN while on."""
    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = on


def check_rows(report: Report, dtype: str) -> None:
    for cols, tokens in ((2048, 3), (128, 1027), (576, 33)):
        shape = OpShape("rms_norm", dtype, cols=cols)
        check(report, shape, (randn(tokens, cols, dtype=dtype), randn(cols, dtype=dtype), 1e-6), f"{tokens}×{cols}", 2)
    shape = OpShape("rms_norm", dtype, cols=128)
    check(report, shape, (heads(37, 32, 128, dtype), randn(128, dtype=dtype), 1e-6), "strided heads", 2)
    shape = OpShape("add_rms_norm", dtype, cols=2048)
    pair = (randn(7, 2048, dtype=dtype), randn(7, 2048, dtype=dtype))
    check(report, shape, (*pair, randn(2048, dtype=dtype), 1e-6), "7×2048", 4)
    shape = OpShape("gated_rms_norm", dtype, cols=128, kv_heads=32, v_dim=128)
    args = (randn(19, 32, 128, dtype=dtype), heads(19, 32, 128, dtype), randn(128, dtype=dtype), 1e-6)
    check(report, shape, args, "19×32×128", 2)
    shape = OpShape("l2norm", dtype, cols=128, q_heads=16, head_dim=128)
    check(report, shape, (heads(1031, 16, 128, dtype), 1e-6), "1031×16×128", 2)
    for hq, hkv, dim, rotary in ((32, 4, 128, 128), (16, 2, 256, 64), (9, 3, 64, 64)):
        shape = OpShape("rope", dtype, q_heads=hq, kv_heads=hkv, head_dim=dim, rotary_dim=rotary)
        positions = torch.randint(0, 4096, (53,), device=CUDA)
        args = (heads(53, hq, dim, dtype), heads(53, hkv, dim, dtype), positions, table(rotary))
        check(report, shape, args, f"53×{hq}/{hkv}×{dim}, {rotary}", 2)
    shape = OpShape("silu_and_mul", dtype, intermediate=1536)
    check(report, shape, (randn(13, 3072, dtype=dtype),), "13×1536", 2)
    shape = OpShape("write_kv", dtype, kv_heads=4, head_dim=128, v_dim=128)
    pools = [randn(50, 16, 4, 128, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(800, device=CUDA)[:77]
    args = (heads(77, 4, 128, dtype), heads(77, 4, 128, dtype), *pools, slots)
    check(report, shape, args, "77×4×128", 1e-9, in_place=(2, 3))
    for count, top_k in ((128, 8), (256, 8), (60, 4)):
        shape = OpShape("router_topk", dtype, experts=count, top_k=top_k)
        order = torch.rand(37, count, device=CUDA).argsort(-1)
        for renormalise in (True, False):
            args = ((order * (8.0 / count)).to(getattr(torch, dtype)), top_k, renormalise)
            check(report, shape, args, f"37×{count}, {top_k}, {renormalise}", 1e-2)
    check_fused(report, dtype)


FUSED = {"rope_write": (8, 9), "residual_add": (), "sigmoid_gate": (), "delta_gates": (), "delta_net": (5,)}
"""Ops that several smaller ones make up, and which arguments they write."""


def check_fused(report: Report, dtype: str) -> None:
    """At the sizes that the conformance suite tries them at."""
    for op, in_place in FUSED.items():
        for shape in OP_CASES[op].shapes(op, dtype):
            for tokens in (1, 3, 17, 150):
                args = OP_CASES[op].make(shape, tokens, "cuda").args
                check(report, shape, args, f"{tokens} tokens, {shape.head_dim or shape.cols}", 8, in_place=in_place)


def check_linear(report: Report, dtype: str) -> None:
    for rows, cols in ((5120, 2048), (128, 2048), (1, 2048), (2048, 4096), (2048, 512), (777, 1096)):
        weight = randn(rows, cols, dtype=dtype, scale=cols**-0.5)
        for tokens in (1, 2, 5, 16, 17):
            shape = OpShape("linear", dtype, rows=rows, cols=cols)
            check(report, shape, (randn(tokens, cols, dtype=dtype), weight), f"{tokens}×{cols}→{rows}", 2)


def check_experts(report: Report, dtype: str) -> None:
    for name in MODELS:
        shape = evolve(next(s for s in model_shapes(name, dtype) if s.op == "experts"), dtype=dtype)
        packed, plain = bank(shape)
        wide_plain = wide(plain)
        for tokens in (1, 3, 4, 5, 16, 63, 65, 119, 523, 2047):
            hidden = randn(tokens, shape.cols, dtype=dtype)
            weights, slots = routing(tokens, shape)
            reference = (hidden, weights, slots, wide_plain)
            check(
                report, shape, (hidden, weights, slots, packed), f"{name} {tokens} tokens", 4, reference_args=reference
            )
        hidden, slots = randn(300, shape.cols, dtype=dtype), torch.full((300, shape.top_k), 7, device=CUDA).int()
        weights = torch.rand(300, shape.top_k, device=CUDA)
        args = (hidden, weights, slots, packed)
        check(report, shape, args, f"{name} one expert", 4, reference_args=(hidden, weights, slots, wide_plain))
        del packed, plain, wide_plain
        torch.cuda.empty_cache()


def check_recurrent(report: Report, dtype: str) -> None:
    for tokens, sequences in ((1, 1), (17, 17), (5, 1), (119, 1), (1031, 5), (4097, 3)):
        lengths = ragged(tokens, sequences)
        shape = OpShape("causal_conv", dtype, rows=8192, width=4)
        x = randn(tokens, 8192 + 4096, dtype=dtype)[:, :8192]
        state = torch.randn(sequences + 3, 8192, 3, device=CUDA)
        args = (x, randn(8192, 4, dtype=dtype), state, *where(lengths, [i % 2 for i in range(sequences)]))
        check(report, shape, args, f"{tokens} tokens, {sequences} sequences", 2, in_place=(2,))
        shape = OpShape("gated_delta", dtype, q_heads=16, kv_heads=32, head_dim=128, v_dim=128)
        args = delta_inputs(tokens, sequences, shape)
        check(report, shape, args, f"{tokens} tokens, {sequences} sequences", 6, in_place=(5,))


def check_sample(report: Report) -> None:
    settings: tuple[dict[str, float], ...] = (
        {"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6}, {"top_p": 0.8}, {"min_p": 0.05},
        {"top_k": 5000}, {"top_p": 0.999, "temperature": 2.0}, {"top_k": 1}, {"top_k": 50, "min_p": 0.1, "top_p": 0.9},
    )  # fmt: skip
    for vocab in (151936, 248320, 1001):
        for given in settings:
            shape = OpShape("sample", "float32", rows=vocab)
            args = sampling_rows(33, vocab, **given)
            name = f"sample {vocab} {given}: rows that differ"

            def run(shape: OpShape = shape, args: Any = args, name: str = name, given: Any = given) -> None:
                differ = int((load(shape)(*args) != REFERENCE["sample"](*args)).sum())
                # Another order of summation moves a draw across a boundary now and then; a greedy row never.
                report.show_check(Check(name, differ, differ, 0 if given.get("temperature") == 0.0 else 1))

            report.attempt(name, run)


# ------------------------------------------------------------------------------------------------ times


def time_us(calls: Sequence[Call], graph: bool = True) -> float:
    """Mean time of one call, over ``calls`` in a row, in one CUDA graph where they are captured."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    replay: Call
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for call in calls:
                call()
        replay = captured.replay
    else:

        def replay() -> None:
            for call in calls:
                call()

    replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    repeats = 5
    for _ in range(repeats):
        replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / (repeats * len(calls))


def timed(
    report: Report, label: str, tokens: int, calls: Sequence[Call], roof: float, library: Sequence[Call] = ()
) -> None:
    """One row of the table, or one failure."""

    def run() -> None:
        own = time_us(calls)
        report.show_timing(Timing(label, tokens, own, roof, time_us(library) if library else None))

    report.attempt(f"time of {label}, {tokens}", run)


def roof_us(num_bytes: float, flops: float = 0.0) -> float:
    return 1e6 * max(num_bytes / ROOF_BYTES, flops / ROOF_FLOPS)


def copies(nbytes: int, most: int = 64) -> int:
    """How many sets of operands exceed the second-level cache several times."""
    return max(2, min(most, FLUSH_BYTES // max(nbytes, 1)))


def time_linear(report: Report) -> None:
    for rows, cols in ((5120, 2048), (2048, 4096), (128, 2048), (12288, 2048), (151936, 2048)):
        weight_bytes = rows * cols * 2
        weights = [randn(rows, cols) for _ in range(copies(weight_bytes))]
        call = load(OpShape("linear", "bfloat16", rows=rows, cols=cols))
        for tokens in (1, 2, 8, 16):
            x = randn(tokens, cols)
            own, library = ([partial(f, x, w) for w in weights] for f in (call, F.linear))
            timed(report, f"linear {cols}→{rows}", tokens, own, roof_us(weight_bytes), library)


def experts_roof(tokens: int, shape: OpShape, slots: torch.Tensor) -> float:
    distinct = int(slots.unique().numel())
    matrix = 3 * shape.cols * shape.intermediate
    return roof_us(2 * distinct * matrix + 4 * tokens * shape.cols, 2.0 * tokens * shape.top_k * matrix)


def time_experts(report: Report) -> None:
    for name in MODELS:
        shape = next(s for s in model_shapes(name) if s.op == "experts")
        banks = [bank(shape)[0] for _ in range(2)]
        call = load(shape)
        for tokens in (1, 2, 4, 5, 8, 16, 32, 64, 119, 256, 1024, 2048, 8192):
            sets = [(randn(tokens, shape.cols), *routing(tokens, shape)) for _ in range(8 if tokens <= 64 else 2)]
            calls = [partial(call, *s, banks[i % 2]) for i, s in enumerate(sets)]
            roof = sum(experts_roof(tokens, shape, s[2]) for s in sets) / len(sets)
            form = experts_tiles.choose_form(tokens, shape, DEVICE).name
            timed(report, f"experts {name} ({form})", tokens, calls, roof)
        banks.clear()
        torch.cuda.empty_cache()


def time_rows(report: Report) -> None:
    def one(name: str, tokens: int, num_bytes: int, make: Callable[[], Call]) -> None:
        calls = [make() for _ in range(copies(num_bytes, 32))]
        timed(report, name, tokens, calls, roof_us(num_bytes))

    norm, add = load(OpShape("rms_norm", "bfloat16", cols=2048)), load(OpShape("add_rms_norm", "bfloat16", cols=2048))
    head = load(OpShape("rms_norm", "bfloat16", cols=128))
    rope = load(OpShape("rope", "bfloat16", q_heads=32, kv_heads=4, head_dim=128, rotary_dim=128))
    write = load(OpShape("write_kv", "bfloat16", kv_heads=4, head_dim=128, v_dim=128))
    topk = load(OpShape("router_topk", "bfloat16", experts=128, top_k=8))
    silu = load(OpShape("silu_and_mul", "bfloat16", intermediate=512))
    gated = load(OpShape("gated_rms_norm", "bfloat16", cols=128, kv_heads=32, v_dim=128))
    l2 = load(OpShape("l2norm", "bfloat16", cols=128, q_heads=16, head_dim=128))
    weight, small, angles = randn(2048), randn(128), table(128)
    pools = [randn(600, 16, 4, 128) for _ in range(2)]
    for t in (1, 16, 8192):
        positions, slots = torch.arange(t, device=CUDA) % 4096, torch.arange(t, device=CUDA)
        one("rms_norm 2048", t, t * 8192, lambda t=t: lambda x=randn(t, 2048): norm(x, weight, 1e-6))
        one(
            "add_rms_norm 2048",
            t,
            t * 16384,
            lambda t=t: lambda x=randn(t, 2048), r=randn(t, 2048): add(x, r, weight, 1e-6),
        )
        one(
            "rms_norm 32 heads of 128",
            t,
            t * 16384,
            lambda t=t: lambda x=heads(t, 32, 128, "bfloat16"): head(x, small, 1e-6),
        )
        one(
            "rope 32+4 heads of 128",
            t,
            t * 18432,
            lambda t=t, p=positions: (
                lambda q=heads(t, 32, 128, "bfloat16"), k=heads(t, 4, 128, "bfloat16"): rope(q, k, p, angles)
            ),
        )
        one(
            "write_kv 4 heads of 128",
            t,
            t * 4096,
            lambda t=t, s=slots: lambda k=heads(t, 4, 128, "bfloat16"): write(k, k, *pools, s),
        )
        one("router_topk 8 of 128", t, t * 320, lambda t=t: lambda x=randn(t, 128): topk(x, 8, True))
        one("silu_and_mul 512", t, t * 3072, lambda t=t: lambda x=randn(t, 1024): silu(x))
        one(
            "gated_rms_norm 32 heads of 128",
            t,
            t * 24576,
            lambda t=t: lambda x=randn(t, 32, 128), g=heads(t, 32, 128, "bfloat16"): gated(x, g, small, 1e-6),
        )
        one("l2norm 16 heads of 128", t, t * 8192, lambda t=t: lambda x=heads(t, 16, 128, "bfloat16"): l2(x, 1e-6))


def time_recurrent(report: Report) -> None:
    shape = OpShape("gated_delta", "bfloat16", q_heads=16, kv_heads=32, head_dim=128, v_dim=128)
    delta, conv = load(shape), load(OpShape("causal_conv", "bfloat16", rows=8192, width=4))
    weight = randn(8192, 4)
    for tokens, sequences in ((1, 1), (16, 16), (64, 64), (119, 1), (1600, 1), (8192, 1), (8192, 8)):
        sets = [delta_inputs(tokens, sequences, shape) for _ in range(8 if tokens <= 128 else 2)]
        state = sequences * 32 * 128 * 128 * 8
        rows = tokens * (2 * 16 * 128 + 2 * 32 * 128) * 2
        # Per chunk of 64 and head: k kᵀ, q kᵀ, W, U, W S, q S, scores · V', kᵀ V' of 64×64×128 or 64×128×128.
        flops = 0.0 if tokens == sequences else 2.0 * tokens * 32 * (5 * 64 * 128 + 3 * 128 * 128)
        calls = [partial(delta, *s) for s in sets]
        timed(report, f"gated_delta {sequences} sequences", tokens, calls, roof_us(state + rows, flops))
        inputs = [
            (randn(tokens, 12288)[:, :8192], weight, torch.randn(sequences + 3, 8192, 3, device=CUDA),
             *where(ragged(tokens, sequences), [i % 2 for i in range(sequences)]))
            for _ in range(8 if tokens <= 128 else 2)
        ]  # fmt: skip
        calls = [partial(conv, *s) for s in inputs]
        roof = roof_us(tokens * 8192 * 4 + sequences * 8192 * 24)
        timed(report, f"causal_conv {sequences} sequences", tokens, calls, roof)


def time_sample(report: Report) -> None:
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("greedy", {"temperature": 0.0}), ("temperature", {}), ("top-k, top-p", {"top_k": 20, "top_p": 0.95}),
        ("top-p, peaked", {"top_p": 0.9, "temperature": 0.5}), ("top-p, flat", {"top_p": 0.95, "flat": True}),
        ("min-p", {"min_p": 0.05}),
    )  # fmt: skip
    for vocab in (151936, 248320):
        call = load(OpShape("sample", "float32", rows=vocab))
        for rows in (1, 16, 64):
            for label, given in kinds:
                sets = [sampling_rows(rows, vocab, **given) for _ in range(4)]
                calls = [partial(call, *s) for s in sets]
                timed(report, f"sample {vocab} {label}", rows, calls, roof_us(rows * vocab * 4))


# ------------------------------------------------------------------------------------------------ sweeps


GEMV_TILES = [
    GemmTile(1, n, k, w, 1) for n, k, w in (
        (1, 2048, 4), (2, 2048, 4), (4, 2048, 4), (8, 2048, 4), (4, 1024, 4), (8, 1024, 4), (4, 2048, 8), (16, 512, 4),
        (1, 4096, 4), (2, 4096, 4), (2, 4096, 8), (2, 2048, 2), (1, 2048, 2),
    )
]  # fmt: skip
SKINNY_TILES = [
    GemmTile(16, *t) for t in (
        (16, 256, 4, 4), (16, 256, 2, 4), (16, 128, 2, 6), (16, 512, 4, 3), (32, 256, 4, 3), (32, 128, 4, 5),
        (32, 128, 2, 5), (64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4), (64, 128, 8, 4),
    )
]  # fmt: skip
PAIR_TILES = [
    (GemmTile(1, a, b, w, 1), GemmTile(1, c, d, v, 1)) for (a, b, w), (c, d, v) in (
        ((2, 2048, 4), (8, 256, 4)), ((1, 2048, 4), (8, 256, 2)), ((4, 2048, 4), (4, 256, 4)),
        ((4, 1024, 4), (4, 256, 2)), ((8, 512, 4), (16, 256, 4)), ((2, 2048, 8), (4, 256, 1)),
        ((2, 1024, 2), (8, 256, 8)), ((1, 2048, 2), (2, 256, 1)),
    )
]  # fmt: skip
SLOT_TILES = [
    GemmTile(16, *t) for t in (
        (64, 128, 4, 4), (64, 128, 4, 3), (32, 256, 4, 3), (64, 64, 4, 6), (128, 128, 4, 3), (128, 64, 4, 4),
        (64, 256, 4, 3), (128, 128, 8, 3), (32, 128, 4, 5), (32, 128, 2, 5),
    )
]  # fmt: skip
TILE_TILES = [
    GemmTile(*t) for t in (
        (16, 128, 128, 4, 3), (32, 128, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 128, 64, 4, 3),
        (64, 256, 64, 8, 3), (128, 64, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 4, 4),
        (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 128, 8, 2),
    )
]  # fmt: skip


def precompile(launches: Iterable[TritonLaunch]) -> None:
    """Compile what ``launches`` need in workers, so that a sweep spends its time on the device."""
    target = Target.of(DEVICE)
    requests = {r.key: r for r in (compile_request(launch, target) for launch in launches)}
    report = compile_requests(tuple(requests.values()), os.cpu_count() or 1)
    for result in report.errors:
        print(f"does not compile: {result.key[:120]}: {result.error[:200]}")
    print(f"# {report} in {report.seconds:.1f} s", flush=True)


def sweep_linear(report: Report) -> None:
    tables = {1: ("gemv_tile", GEMV_TILES), 16: ("skinny_tile", SKINNY_TILES)}
    cases = [(OpShape("linear", "bfloat16", rows=r, cols=c), tokens) for r, c in
             ((5120, 2048), (2048, 4096), (151936, 2048)) for tokens in tables]  # fmt: skip

    def with_tile(tokens: int, tile: GemmTile) -> Any:
        name = tables[tokens][0]
        before = getattr(linear, name)
        setattr(linear, name, lambda shape, device: tile)
        return name, before

    launches = []
    for shape, tokens in cases:
        for tile in tables[tokens][1]:
            name, before = with_tile(tokens, tile)
            launches.append(linear.launch(tokens, shape.cols, shape, DEVICE))
            setattr(linear, name, before)
    precompile(launches)
    for shape, tokens in cases:
        weights = [randn(shape.rows, shape.cols) for _ in range(copies(2 * shape.rows * shape.cols))]
        x = randn(tokens, shape.cols)
        for tile in tables[tokens][1]:
            name, before = with_tile(tokens, tile)
            label = f"  linear {shape.cols}→{shape.rows} n{tile.n} k{tile.k} w{tile.num_warps} s{tile.num_stages}"

            def run(shape: OpShape = shape, weights: Any = weights, x: Any = x, label: str = label) -> None:
                call = load(shape)
                us = time_us([partial(call, x, w) for w in weights])
                report.show_timing(Timing(label, x.shape[0], us, roof_us(2 * shape.rows * shape.cols)))

            report.attempt(label, run)
            setattr(linear, name, before)


def sweep_one(report: Report, shape: OpShape, sets: Any, banks: Any, label: str, roof: float) -> None:
    call = load(shape)
    us = time_us([partial(call, *s, banks[i % 2]) for i, s in enumerate(sets)])
    report.show_timing(Timing(label, len(sets[0][0]), us, roof))


def sweep_experts(report: Report) -> None:
    plans = {1: ("pair", PAIR_TILES), 4: ("pair", PAIR_TILES), 16: ("slot", SLOT_TILES), 64: ("slot", SLOT_TILES),
             256: ("tile", TILE_TILES), 2048: ("tile", TILE_TILES), 8192: ("tile", TILE_TILES)}  # fmt: skip

    def form(name: str, tile: Any) -> experts_tiles.Form:
        up, down = tile if isinstance(tile, tuple) else (tile, tile)
        return experts_tiles.Form(name, up, down)

    original = experts.choose_form
    for model in MODELS:
        shape = next(s for s in model_shapes(model) if s.op == "experts")
        launches: list[TritonLaunch] = []
        for tokens, (name, tiles) in plans.items():
            for tile in tiles:
                experts.choose_form = lambda *_, f=form(name, tile): f
                launches += experts.step_launches(tokens, shape.experts, shape.cols, shape, DEVICE)
        precompile(launches)
        banks = [bank(shape)[0] for _ in range(2)]
        for tokens, (name, tiles) in plans.items():
            sets = [(randn(tokens, shape.cols), *routing(tokens, shape)) for _ in range(8 if tokens <= 64 else 2)]
            roof = sum(experts_roof(tokens, shape, s[2]) for s in sets) / len(sets)
            for tile in tiles:
                experts.choose_form = lambda *_, f=form(name, tile): f
                text = " / ".join(f"m{t.m} n{t.n} k{t.k} w{t.num_warps} s{t.num_stages}" for t in
                                  (tile if isinstance(tile, tuple) else (tile,)))  # fmt: skip

                run = partial(sweep_one, report, shape, sets, banks, f"  experts {model[:8]} {text}", roof)
                report.attempt(f"experts {text}", run)
        experts.choose_form = original
        banks.clear()
        torch.cuda.empty_cache()


def sweep_delta(report: Report) -> None:
    shape = OpShape("gated_delta", "bfloat16", q_heads=16, kv_heads=32, head_dim=128, v_dim=128)
    original = gated_delta.step_launches
    variants = [
        (block, warps, stages, chunk_warps)
        for block in (16, 32, 64) for warps in (4, 8) for stages in (1, 2, 3) for chunk_warps in (4,)
    ] + [(32, 4, 2, 8), (32, 4, 2, 2)]  # fmt: skip

    def variant(tokens: int, sequences: int, strides: Any, *rest: Any, v: Any) -> tuple[TritonLaunch, ...]:
        chunk, scan = original(tokens, sequences, strides, *rest)
        constexprs = tuple((n, v[0] if n == "BLOCK_V" else value) for n, value in scan.constexprs)
        grid = (128 // v[0], *scan.grid[1:])
        scan = evolve(scan, constexprs=constexprs, grid=grid, num_warps=v[1], num_stages=v[2])
        return evolve(chunk, num_warps=v[3]), scan

    strides = (2048, 2048, 8192, 32, 32)
    precompile(
        launch for v in variants for launch in variant(8192, 1, strides, shape, DEVICE, v=v)
        if launch.num_stages < 3 or dict(launch.constexprs)["BLOCK_V"] < 64
    )  # fmt: skip
    for tokens in (119, 8192):
        sets = [delta_inputs(tokens, 1, shape) for _ in range(2)]
        for v in variants:
            gated_delta.step_launches = lambda *a, v=v: variant(*a, v=v)
            label = f"  gated_delta v{v[0]} w{v[1]} s{v[2]} chunk w{v[3]}"

            def run(sets: Any = sets, label: str = label, tokens: int = tokens) -> None:
                call = load(shape)
                report.show_timing(Timing(label, tokens, time_us([partial(call, *s) for s in sets]), 0.0))

            report.attempt(label, run)
    gated_delta.step_launches = original


CHECKS = {"rows": check_rows, "linear": check_linear, "experts": check_experts, "recurrent": check_recurrent}
TIMES = {
    "rows": time_rows, "linear": time_linear, "experts": time_experts, "recurrent": time_recurrent,
    "sample": time_sample,
}  # fmt: skip
SWEEPS = {"linear": sweep_linear, "experts": sweep_experts, "recurrent": sweep_delta}


VARIANT_MATRICES = (
    (5120, 2048), (2048, 4096), (128, 2048), (12288, 2048), (64, 2048), (1, 2048), (151936, 2048),
)  # fmt: skip
"""Outputs and inputs of one row's products."""


def variant_launches() -> list[TritonLaunch]:
    """Everything that ``time_variants`` launches, so that it is compiled by all cores beforehand."""
    found: list[TritonLaunch] = []
    matrices = [OpShape("linear", "bfloat16", rows=rows, cols=cols) for rows, cols in VARIANT_MATRICES]
    for name in experts_tiles.PAIR_VARIANTS:
        experts_tiles.PAIR_VARIANT = name
        for model in MODELS:
            shape = next(s for s in model_shapes(model) if s.op == "experts")
            found += experts.step_launches(1, shape.experts, shape.cols, shape, DEVICE)
    for name in linear.GEMV_VARIANTS:
        linear.GEMV_VARIANT = name
        found += [linear.launch(1, shape.cols, shape, DEVICE) for shape in matrices]
    return found


def time_variants(report: Report) -> None:
    """The named tables of the pair kernels and of one row's products. Every call reads other operands than the last."""
    used = experts_tiles.PAIR_VARIANT, linear.GEMV_VARIANT
    try:
        precompile(variant_launches())
        for model in MODELS:
            shape = next(s for s in model_shapes(model) if s.op == "experts")
            banks = [bank(shape)[0] for _ in range(2)]
            for tokens in (1, 4):
                sets = [(randn(tokens, shape.cols), *routing(tokens, shape)) for _ in range(8)]
                roof = sum(experts_roof(tokens, shape, s[2]) for s in sets) / len(sets)
                for name in experts_tiles.PAIR_VARIANTS:
                    experts_tiles.PAIR_VARIANT = name
                    report.attempt(name, partial(sweep_one, report, shape, sets, banks, f"pair {model} {name}", roof))
            banks.clear()
            torch.cuda.empty_cache()
        for rows, cols in VARIANT_MATRICES:
            weights = [randn(rows, cols) for _ in range(copies(rows * cols * 2))]
            x = randn(1, cols)
            for name in linear.GEMV_VARIANTS:
                linear.GEMV_VARIANT = name
                call = load(OpShape("linear", "bfloat16", rows=rows, cols=cols))
                label, roof = f"one row {cols}→{rows} {name}", roof_us(rows * cols * 2)
                timed(report, label, 1, [partial(call, x, w) for w in weights], roof)
            weights.clear()
    finally:
        experts_tiles.PAIR_VARIANT, linear.GEMV_VARIANT = used


def compile_declared() -> None:
    spaces = [enumerate_keys(declared(model, SPECS, DEVICE)) for model in MODELS]
    precompile(use.launch for s in spaces for use in s.uses.values() if isinstance(use.launch, TritonLaunch))


def run_group(report: Report, group: str, given: argparse.Namespace) -> None:
    """Everything about one group, in this process."""
    if not given.no_check and group in CHECKS:
        for dtype in ("bfloat16", "float16"):
            report.attempt(group, partial(CHECKS[group], report, dtype))
    if not given.no_check and group == "sample":
        report.attempt(group, partial(check_sample, report))
    if not given.no_time:
        report.attempt(group, partial(TIMES[group], report))
    if given.sweep and group in SWEEPS:
        report.attempt(group, partial(SWEEPS[group], report))


def run_child(report: Report, group: str, given: argparse.Namespace) -> None:
    """The same in a process of its own: an illegal access would spoil this one's context for good."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "report.json"
        flags = [f for f, on in (("--no-check", given.no_check), ("--no-time", given.no_time), ("--sweep", given.sweep))
                 if on]  # fmt: skip
        command = [sys.executable, __file__, "--only", group, "--json", str(found), *flags]
        try:
            status = subprocess.run(command, timeout=given.limit, check=False).returncode
        except subprocess.TimeoutExpired:
            status = -1
        if not found.exists():
            report.failures.append(f"{group}: its process ended with status {status} and no report")
            return
        data = json.loads(found.read_text())
        report.checks.extend(Check(**c) for c in data["checks"])
        report.timings.extend(Timing(**t) for t in data["timings"])
        report.failures.extend(data["failures"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=list(TIMES))
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for one group")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    started = time.perf_counter()
    if given.variants:
        time_variants(report)
    elif len(given.only) == 1:
        run_group(report, given.only[0], given)
    else:
        report.attempt("compiling the declared keys", compile_declared)
        for group in given.only or TIMES:
            print(f"# {group}, after {time.perf_counter() - started:.0f} s", flush=True)
            run_child(report, group, given)
    bad = [c for c in report.checks if not c.good]
    print(f"# {len(report.checks)} checks, {len(bad)} bad, {len(report.failures)} failures, "
          f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
    for line in [*(f"BAD {c.name}: {c.max_error:.3e} > {c.bound:.1e}" for c in bad), *report.failures]:
        print(line)
    if given.json:
        given.json.write_text(json.dumps(asdict(report), indent=1))
    return int(bool(bad or report.failures))


if __name__ == "__main__":
    sys.exit(main())
