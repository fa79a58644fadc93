"""Checks and times the Triton attention backend on a GPU: a table on standard output, and JSON with ``--json PATH``.

    python3 benchmarks/gpu_attention.py [--sweep | --variants] [--json PATH]

First the results against a float32 reference on odd sizes and on pools beyond 2³¹ elements, then prefill and decode
against their roofs. ``--sweep`` times further tiles beside the table's; ``--variants`` times nothing but the few tiles
worth a choice for prefill, and decode at short contexts with parts of at least 1, 2 and 4 blocks. One failing case does
not stop the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor

from freetoken.ops.triton_stub import Target, compile_request
from freetoken.plugin.protocols import AttentionLimits, AttentionSetup
from freetoken.testing.fakes import make_batch, make_device, sequence_slots
from freetoken.testing.tolerances import assert_close
from freetoken.vocab.batch import Batch
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import AttentionGroup
from freetoken.warmup.compile_worker import compile_requests
from freetoken_attention_triton import launches as launches_module
from freetoken_attention_triton import tiles as tiles_module
from freetoken_attention_triton.backend import TritonAttention
from freetoken_attention_triton.launches import splits, step_launches
from freetoken_attention_triton.tiles import Tile

ROOF_FLOPS = 805e12
ROOF_BYTES = 4.27e12
PROMPT = 12_700


@frozen
class Model:
    """The attention of a published model."""

    name: str
    q_heads: int
    kv_heads: int
    dim: int


MODELS = (Model("qwen3-30b-a3b", 32, 4, 128), Model("qwen3.6-35b-a3b", 16, 2, 256))
DECODE = tuple((sequences, context) for context in (1024, 16_384, 131_072) for sequences in (1, 16, 64))
PREFILL_TILES = ((128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3))
DECODE_TILES = ((16, 64, 4, 3), (16, 64, 4, 5), (16, 32, 4, 5), (16, 128, 4, 4), (16, 128, 8, 5), (16, 64, 2, 5))
DECODE_PROGRAMS = (2, 3, 4, 6)
VARIANT_TILES = {
    128: ((128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (256, 32, 16, 3), (256, 64, 16, 3), (128, 64, 8, 3)),
    256: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)),
}
"""By head size, the table's first. Compiled for compute capability 9.0 they spill at most 72 bytes a thread.

Two programs of (64, 64, 4, ·) fit on a multiprocessor, so that one's softmax may hide behind the other's products; 256
rows halve the loads of keys and values a product. Asking Triton 3.6 for warp specialisation changes nothing with 8
warps and does not compile with 4: keys are gathered page by page, which its loads through descriptors cannot do.
Beginning the next block's scores before this block's softmax brings nothing: Triton waits where they begin."""
VARIANT_BLOCKS = (1, 2, 4)


@frozen
class Check:
    """One comparison with the reference."""

    dtype: str
    heads: tuple[int, int]
    dim: int
    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    window: int | None = None
    page: int = 16
    pages: int | None = None


CHECKS = (
    *(
        Check(dtype, heads, dim, (1, 127, 129, 1, 300, 17), (4001, 0, 33, 700, 1055, 5), window, page)
        for dtype in ("bfloat16", "float16")
        for heads, dim in (((32, 4), 128), ((16, 2), 256), ((9, 3), 64), ((6, 6), 80), ((8, 1), 96))
        for window, page in ((None, 16), (513, 32))
    ),
    Check("float32", (8, 2), 64, (130, 1), (17, 900)),
    Check("bfloat16", (32, 4), 128, (1,) * 7, (1, 15, 16, 17, 12_345, 63, 64)),
    Check("bfloat16", (32, 4), 128, (1,) * 300, tuple(range(1, 301))),
    Check("bfloat16", (32, 4), 128, (5,), (9000,)),
    Check("bfloat16", (32, 4), 128, (2500,), (0,)),
    Check("bfloat16", (32, 4), 128, (1, 200, 3), (900, 100, 40), pages=270_000),
    Check("bfloat16", (16, 2), 256, (1, 1), (900, 100), pages=270_000),
)


def backend(
    heads: tuple[int, int], dim: int, dtype: str, window: int | None, page: int, device: Device, context: int
) -> TritonAttention:
    cache = PagedKV(heads[1], dim, dim, dtype, window)
    limits = AttentionLimits(page, max(context, 131_072 + 16), 512, 16_384)
    group = AttentionGroup("group", (0,), heads[0], cache, dim**-0.5)
    return TritonAttention(AttentionSetup(group, device, dtype, limits))


def pools(pages: int, page: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (pages, page, kv_heads, dim)
    return torch.empty(shape, dtype=dtype, device="cuda"), torch.empty(shape, dtype=dtype, device="cuda")


def reference(q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, page: int, window: int | None) -> Tensor:
    """Softmax attention in float32 on the GPU, a sequence at a time."""
    out = torch.empty(*q.shape[:2], v_pool.shape[-1], dtype=torch.float32, device=q.device)
    start = 0
    for b, (length, prefix) in enumerate(zip(batch.query_lens, batch.prefix_lens, strict=True)):
        slots = sequence_slots(batch, b, page)
        k = k_pool.view(-1, *k_pool.shape[2:])[slots].float()
        v = v_pool.view(-1, *v_pool.shape[2:])[slots].float()
        share = q.shape[1] // k.shape[1]
        rows = q[start : start + length].float().unflatten(1, (k.shape[1], share))
        scores = torch.einsum("qhgd,khd->hgqk", rows, k) * q.shape[-1] ** -0.5
        ahead = torch.arange(len(slots), device=q.device) - torch.arange(length, device=q.device)[:, None] - prefix
        hidden = ahead > 0
        if window is not None:
            hidden |= ahead <= -window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        out[start : start + length] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
        start += length
    return out


def check(case: Check, device: Device) -> str:
    dtype = getattr(torch, case.dtype)
    batch = make_batch(case.query_lens, case.prefix_lens, case.page, device="cuda", num_pages=case.pages)
    pages = case.pages or int(batch.page_table.max()) + 1
    if case.pages:  # the last page is certainly used, so that offsets cross 2³¹
        batch.page_table[0, 0] = pages - 1
    k_pool, v_pool = pools(pages, case.page, case.heads[1], case.dim, dtype)
    for pool in (k_pool, v_pool):
        if not case.pages:
            pool.fill_(float("nan"))
        for b in range(batch.num_sequences):
            slots = sequence_slots(batch, b, case.page)
            pool.view(-1, case.heads[1], case.dim)[slots] = torch.randn(
                len(slots), case.heads[1], case.dim, dtype=dtype, device="cuda"
            )
    q = torch.randn(batch.num_tokens, case.heads[0], case.dim, dtype=dtype, device="cuda")
    attention = backend(case.heads, case.dim, case.dtype, case.window, case.page, device, 0)
    out = attention.forward(q, k_pool, v_pool, 0, attention.plan(batch))
    expected = reference(q, k_pool, v_pool, batch, case.page, case.window)
    assert_close(out, expected, case.dtype, case.dim, str(case))
    error = float((out.float() - expected).abs().max())
    if all(n == 1 for n in case.query_lens):
        _graph_equals_eager(attention, batch, q, k_pool, v_pool, out)
        return f"max error {error:.1e}, graph equals eager"
    return f"max error {error:.1e}"


def _graph_equals_eager(
    attention: TritonAttention, batch: Batch, q: Tensor, k_pool: Tensor, v_pool: Tensor, eager: Tensor
) -> None:
    other = make_batch((1,) * batch.num_sequences, (2,) * batch.num_sequences, k_pool.shape[1], device="cuda")
    attention.reserve_graph(attention._limits)
    plan = attention.plan_capture(other)
    attention.forward(q, k_pool, v_pool, 0, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.forward(q, k_pool, v_pool, 0, plan)
    attention.plan_replay(plan, batch)
    graph.replay()
    assert torch.equal(out, eager), "a replayed graph differs from the eager step"
    attention.release_graph()


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The median of ``repeats`` timings by CUDA events, after two warm calls."""
    for _ in range(2):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def with_tile(attention: TritonAttention, phase: str, tile: Tile | None) -> TritonAttention:
    if tile is not None:
        attention._geometry = evolve(attention._geometry, **{phase: tile})
    return attention


def prefill(model: Model, device: Device, tile: Tile | None, query: int, prefix: int) -> dict[str, Any]:
    attention = with_tile(
        backend((model.q_heads, model.kv_heads), model.dim, "bfloat16", None, 16, device, 0), "prefill", tile
    )
    batch = make_batch((query,), (prefix,), 16, device="cuda")
    k_pool, v_pool = pools(int(batch.page_table.max()) + 1, 16, model.kv_heads, model.dim, torch.bfloat16)
    k_pool.normal_()
    v_pool.normal_()
    q = torch.randn(query, model.q_heads, model.dim, dtype=torch.bfloat16, device="cuda")
    plan = attention.plan(batch)
    ms = milliseconds(lambda: attention.forward(q, k_pool, v_pool, 0, plan), 10)
    flops = 4 * model.q_heads * model.dim * (query * prefix + query * (query + 1) // 2)
    used = attention._geometry.prefill
    return {
        "case": f"{model.name} prefill {query} after {prefix}", "tile": _tile(used), "ms": round(ms, 4),
        "tflops": round(flops / ms / 1e9, 1), "of_roof": round(flops / ms / 1e-3 / ROOF_FLOPS, 3),
    }  # fmt: skip


def decode(model: Model, device: Device, tile: Tile | None, sequences: int, context: int) -> dict[str, Any]:
    """Enough layers' pools in one graph that nothing is read from the L2 cache twice."""
    attention = with_tile(
        backend((model.q_heads, model.kv_heads), model.dim, "bfloat16", None, 16, device, context), "decode", tile
    )
    batch = make_batch((1,) * sequences, (context - 1,) * sequences, 16, device="cuda")
    moved = sequences * context * model.kv_heads * model.dim * 2 * 2
    layers = max(1, min(48, math.ceil(300e6 / moved)))
    pages = int(batch.page_table.max()) + 1
    layer_pools = [pools(pages, 16, model.kv_heads, model.dim, torch.bfloat16) for _ in range(layers)]
    for pair in layer_pools:
        for pool in pair:
            pool.normal_()
    q = torch.randn(sequences, model.q_heads, model.dim, dtype=torch.bfloat16, device="cuda")
    attention.reserve_graph(attention._limits)
    plan = attention.plan_capture(batch)

    def step() -> None:
        for k_pool, v_pool in layer_pools:
            attention.forward(q, k_pool, v_pool, 0, plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ms = milliseconds(graph.replay, 20) / layers
    used = attention._geometry.decode
    return {
        "case": f"{model.name} decode {sequences} × {context}", "tile": _tile(used), "ms": round(ms, 5),
        "gbps": round(moved / ms / 1e6), "of_roof": round(moved / ms / 1e-3 / ROOF_BYTES, 3),
        "splits": plan.parts.decode,
    }  # fmt: skip


def variants(results: list[dict[str, Any]], device: Device) -> None:
    """The tiles of ``VARIANT_TILES``, and the smallest part of a split context."""
    for model in MODELS:
        for tile in (Tile(*t) for t in VARIANT_TILES[model.dim]):
            for query, prefix in ((PROMPT, 0), (8192, 0), (2048, 10_652)):
                attempt(
                    results, f"{model.name} prefill {tile}",
                    lambda model=model, tile=tile, q=query, p=prefix: prefill(model, device, tile, q, p),
                )  # fmt: skip
        used = launches_module.MIN_DECODE_BLOCKS
        for blocks in VARIANT_BLOCKS:
            launches_module.MIN_DECODE_BLOCKS = blocks
            for sequences, context in ((1, 100), (1, 500), (1, 1024), (1, 4096), (1, 16_384), (16, 500)):
                attempt(
                    results, f"{model.name} decode, at least {blocks} blocks",
                    lambda model=model, s=sequences, c=context, b=blocks: {
                        "blocks": b, **decode(model, device, None, s, c)
                    },
                )  # fmt: skip
        launches_module.MIN_DECODE_BLOCKS = used


def launch_overhead(device: Device) -> dict[str, Any]:
    """Host time of one eager decode forward (two launches), many in a row, and of Triton's own launch path."""
    model = MODELS[0]
    attention = backend((model.q_heads, model.kv_heads), model.dim, "bfloat16", None, 16, device, 0)
    batch = make_batch((1,), (15,), 16, device="cuda")
    k_pool, v_pool = pools(int(batch.page_table.max()) + 1, 16, model.kv_heads, model.dim, torch.bfloat16)
    q = torch.randn(1, model.q_heads, model.dim, dtype=torch.bfloat16, device="cuda")
    plan = attention.plan(batch)
    ours = _host_us(lambda: attention.forward(q, k_pool, v_pool, 0, plan))
    ((_, first), *_) = attention._bound(1, 1, plan.parts, q.stride(0), plan.page_table.stride(0))
    out = torch.empty_like(q)
    tensors = (q, k_pool, v_pool, out, plan.partial, plan.lse, plan.page_table, plan.query_starts, plan.context_lens)
    bound = _host_us(lambda: first(*tensors))
    plain = _host_us(lambda: first._first(first._values.copy(), tensors))
    return {"case": "host µs", "forward": round(ours, 1), "bound launch": round(bound, 1), "triton": round(plain, 1)}


def _host_us(call: Callable[[], object], repeats: int = 500) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return spent / repeats * 1e6


def _tile(tile: Tile) -> str:
    return f"{tile.rows}x{tile.keys} w{tile.num_warps} s{tile.num_stages}"


def precompile(device: Device, sweep: bool) -> str:
    """All kernels of the run, in as many processes as there are cores."""
    requests = {}
    for attention, tokens, sequences, context, is_decode in _planned(device, sweep):
        parts = splits(attention._geometry, tokens, sequences, context, is_decode)
        for launch in step_launches(attention._geometry, tokens, sequences, parts, 4096, 8, 0.1):
            request = compile_request(launch, Target.of(device))
            requests[request.key] = request
    return str(compile_requests(list(requests.values()), os.cpu_count() or 1))


def _planned(device: Device, sweep: bool) -> Iterable[tuple[TritonAttention, int, int, int, bool]]:
    for case in CHECKS:
        attention = backend(case.heads, case.dim, case.dtype, case.window, case.page, device, 0)
        contexts = [q + p for q, p in zip(case.query_lens, case.prefix_lens, strict=True)]
        is_decode = all(n == 1 for n in case.query_lens)
        yield attention, sum(case.query_lens), len(contexts), max(contexts), is_decode
    for model in MODELS:
        for tile in (None, *(Tile(*t) for t in PREFILL_TILES if sweep)):
            made = backend((model.q_heads, model.kv_heads), model.dim, "bfloat16", None, 16, device, 0)
            yield with_tile(made, "prefill", tile), PROMPT, 1, PROMPT, False
        for tile in (None, *(Tile(*t) for t in DECODE_TILES if sweep)):
            for sequences in (1, 64):
                made = backend((model.q_heads, model.kv_heads), model.dim, "bfloat16", None, 16, device, 0)
                yield with_tile(made, "decode", tile), sequences, sequences, 131_072, True


def attempt(results: list[dict[str, Any]], what: str, call: Callable[[], dict[str, Any]]) -> None:
    try:
        found = call()
    except Exception as error:
        traceback.print_exc(limit=3)
        found = {"case": what, "failed": f"{type(error).__name__}: {error}"[:300]}
    torch.cuda.empty_cache()
    results.append(found)
    print("  ".join(f"{key} {value}" if key != "case" else f"{value:48}" for key, value in found.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time further tiles")
    parser.add_argument("--variants", action="store_true", help="time nothing but the tiles worth a choice")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = make_device("cuda")
    started = time.perf_counter()
    results: list[dict[str, Any]] = []
    table_programs = tiles_module.DECODE_PROGRAMS
    if options.variants:
        variants(results, device)
        return finish(options.json, device, results, started)
    attempt(results, "compile", lambda: {"case": "compile", "result": precompile(device, options.sweep)})
    if not options.skip_checks:
        for case in CHECKS:
            name = f"{case.dtype} {case.heads} D{case.dim} w{case.window} p{case.page} T{sum(case.query_lens)}"
            attempt(results, name, lambda case=case, name=name: {"case": name, "result": check(case, device)})
    attempt(results, "launch overhead", lambda: launch_overhead(device))
    for model in MODELS:
        tiles = [None, *(Tile(*t) for t in PREFILL_TILES)] if options.sweep else [None]
        for tile in tiles:
            attempt(
                results, f"{model.name} prefill {tile}",
                lambda model=model, tile=tile: prefill(model, device, tile, PROMPT, 0),
            )  # fmt: skip
        for query, prefix in ((2048, 10_652), (40, 12_660), (119, 0)):
            attempt(
                results, f"{model.name} extend",
                lambda model=model, query=query, prefix=prefix: prefill(model, device, None, query, prefix),
            )  # fmt: skip
        for sequences, context in DECODE:
            attempt(
                results, f"{model.name} decode {sequences} × {context}",
                lambda model=model, s=sequences, c=context: decode(model, device, None, s, c),
            )  # fmt: skip
        for programs in DECODE_PROGRAMS if options.sweep else ():
            tiles_module.DECODE_PROGRAMS = programs
            for sequences, context in ((1, 16_384), (8, 16_384), (40, 4096), (64, 1024)):
                attempt(
                    results, f"{model.name} decode, {programs} programs to a multiprocessor",
                    lambda model=model, s=sequences, c=context, n=programs: {
                        "programs": n, **decode(model, device, None, s, c)
                    },
                )  # fmt: skip
        tiles_module.DECODE_PROGRAMS = table_programs
        for tile in (Tile(*t) for t in DECODE_TILES if options.sweep):
            for sequences, context in ((1, 16_384), (16, 16_384), (64, 1024)):
                attempt(
                    results, f"{model.name} decode {tile}",
                    lambda model=model, tile=tile, s=sequences, c=context: decode(model, device, tile, s, c),
                )  # fmt: skip
    return finish(options.json, device, results, started)


def finish(path: str, device: Device, results: list[dict[str, Any]], started: float) -> int:
    """Write the report; 1 where anything failed."""
    report = {
        "device": asdict(device), "torch": torch.__version__, "roof_flops": ROOF_FLOPS, "roof_bytes": ROOF_BYTES,
        "seconds": round(time.perf_counter() - started, 1), "results": results,
    }  # fmt: skip
    if path:
        with open(path, "w") as file:
            json.dump(report, file, indent=1)
    failures = sum("failed" in result for result in results)
    print(f"{len(results)} results, {failures} failures, {report['seconds']} s")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
