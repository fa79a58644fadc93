"""Experts in host memory on a GPU: correctness, the link's share in decode, and prefill of a long prompt.

    python3 benchmarks/gpu_offload.py [--parts link,check,decode,model] [--layers 8] [--json PATH] [--device cpu]

At the dimensions of Qwen3-30B-A3B with few layers, random weights, and slots for a quarter of the experts:

- ``link``: what the copy engine and the fetch kernel move a second from pinned memory;
- ``check``: offload against resident with the same kernels, bit for bit, for decode and prefill sizes and few slots;
- ``decode``: a captured step of the expert layers alone with uniform and Zipf-1.0 routing, both policies: the share of
  the link, and what the look-up takes when nothing is missing;
- ``model``: whole engines. Greedy tokens of offload and resident; decode; a 12k-token prompt in 4096-token chunks
  against the time of moving its experts once, alone and beside four decodes, with the longest gap between their tokens.

``--device cpu`` runs everything but ``link`` and graphs at toy sizes, to try the script. A part that fails does not
stop the others; exit code 1 then.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from freetoken import LLM, SamplingParams
from freetoken.builtin.moe_resident import ResidentExperts
from freetoken.ops.triton_launch import bind
from freetoken.plugin.protocols import BankPart, ExpertLayer, KernelSetup, MoESetup
from freetoken.testing.fakes import make_batch, make_device
from freetoken.vocab.batch import Batch
from freetoken.vocab.model_spec import MoEShape
from freetoken.vocab.ops import OpShape
from freetoken_moe_offload import launches
from freetoken_moe_offload.cache import SlotCache
from freetoken_moe_offload.index import make_state
from freetoken_moe_offload.options import POLICIES, OffloadOptions
from freetoken_moe_offload.strategy import OffloadExperts

PARTS = ("link", "check", "decode", "model")
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@frozen
class Scale:
    """What is run: the experts' dimensions, and the lengths of prompts."""

    device: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    prompt: int
    chunk: int
    decode_steps: int
    check_tokens: tuple[int, ...]

    @property
    def slots(self) -> int:
        return max(self.experts, self.layers * self.experts // 4)

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * (2 if self.device == "cuda" else 4)


def big(layers: int) -> Scale:
    return Scale("cuda", layers, 128, 8, 2048, 768, 12_288, 4096, 300, (1, 2, 5, 16, 64, 119, 700, 4096))


def toy() -> Scale:
    return Scale("cpu", 2, 8, 2, 128, 64, 48, 16, 10, (1, 2, 5, 40))


class Report:
    """Results as lines, and as one JSON file at the end."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []

    def put(self, name: str, **values: Any) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        self.found[name] = rounded
        print(f"{name:34}", "  ".join(f"{k} {v}" for k, v in rounded.items()), flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps({"found": self.found, "failed": self.failed}, indent=1))

    def part(self, name: str, do: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            do()
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.put(f"{name} FAILED", error=f"{type(error).__name__}: {error}"[:400])
        self.put(f"{name} seconds", seconds=time.perf_counter() - start)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------- strategies alone


def setup_of(scale: Scale, **options: Any) -> MoESetup:
    device, dtype = make_device(scale.device), "bfloat16" if scale.device == "cuda" else "float32"
    shape = OpShape(
        "experts", dtype, cols=scale.hidden, intermediate=scale.intermediate, experts=scale.experts, top_k=scale.top_k,
        formats=(dtype,) * 3,
    )  # fmt: skip
    if scale.device == "cuda":
        from freetoken_kernels_triton.spec import freetoken_kernels
    else:
        from freetoken.builtin.kernels_torch import freetoken_kernels
    spec = next(s for s in freetoken_kernels() if s.op == "experts")
    assert spec.bank_layout is not None
    call = spec.load(KernelSetup(shape, device, dtype, lambda stored: stored.parts["data"].float())).call
    layers = tuple(ExpertLayer(n, spec.bank_layout(shape), call) for n in range(scale.layers))
    moe = MoEShape(tuple(range(scale.layers)), scale.experts, scale.top_k, scale.hidden, scale.intermediate)
    return MoESetup(
        moe, layers, device, dtype, scale.chunk, 64, 64 << 30, 100 << 30, OffloadOptions(**options),
        max_seq_tokens=4 * scale.prompt,
    )  # fmt: skip


def fill(scale: Scale, *strategies: Any) -> None:
    """The same random experts into each."""
    generator = torch.Generator(scale.device).manual_seed(0)
    layout = setup_of(scale).layers[0].layout
    for layer in range(scale.layers):
        for expert in range(scale.experts):
            packed = {}
            for part in layout:
                values = torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=scale.device)
                packed[part.name] = values.normal_(0, part.shape[-1] ** -0.5, generator=generator)
            for strategy in strategies:
                strategy.accept(layer, expert, packed)
    for strategy in strategies:
        strategy.seal()


def batch_of(tokens: int, decode: bool, device: str) -> Batch:
    return make_batch(*(((1,) * tokens, (1,) * tokens) if decode else ((tokens,), (0,))), device=device)


def routing(scale: Scale, steps: int, tokens: int, zipf: float, seed: int) -> Tensor:
    """``[steps, L, T, K] i32``: distinct experts, by popularity 1 / rankˢ in an order of each layer's own."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.arange(1, scale.experts + 1).float().pow(-zipf).log()
    order = torch.stack([torch.randperm(scale.experts, generator=generator) for _ in range(scale.layers)])
    noise = torch.rand(steps, scale.layers, tokens, scale.experts, generator=generator).clamp(min=1e-9)
    ranks = (chances - (-noise.log()).log()).topk(scale.top_k, dim=-1).indices
    picked = torch.gather(order[None, :, None].expand(steps, -1, tokens, -1), 3, ranks)
    return picked.int().contiguous().to(scale.device)


def inputs_of(scale: Scale, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, scale.hidden, generator=generator)
    weights = torch.rand(tokens, scale.top_k, generator=generator)
    dtype = torch.bfloat16 if scale.device == "cuda" else torch.float32
    return hidden.to(scale.device, dtype), weights.to(scale.device)


def one_step(strategy: Any, layer: int, hidden: Tensor, weights: Tensor, experts: Tensor, decode: bool) -> Tensor:
    strategy.begin_step(batch_of(len(hidden), decode, hidden.device.type))
    out: Tensor = strategy.finish(strategy.start(layer, hidden, weights, experts.clone()))
    strategy.end_step()
    return out


def check(scale: Scale, report: Report) -> None:
    """Outputs of one layer after another, decode and prefill; bit-equal where a step needs one pass."""
    few = evolve(scale, layers=min(scale.layers, 2))
    resident = ResidentExperts(setup_of(few))
    offloads = {slots: OffloadExperts(setup_of(few, slots=slots)) for slots in (few.slots, few.experts, few.top_k + 1)}
    fill(few, resident, *offloads.values())
    for slots, offload in offloads.items():
        equal = close = total = 0
        for tokens in few.check_tokens:
            hidden, weights = inputs_of(few, tokens)
            for step, experts in enumerate(routing(few, 3, tokens, 0.5, tokens)):
                for layer in range(few.layers):
                    decode = tokens <= 64 and step % 2 == 0
                    expected = one_step(resident, layer, hidden, weights, experts[layer], decode)
                    out = one_step(offload, layer, hidden, weights, experts[layer], decode)
                    error = (out.float() - expected.float()).abs().max() / expected.float().abs().max()
                    equal += torch.equal(out, expected)
                    close += error.item() < 0.02
                    total += 1
        for cache in offload._caches:
            held_right(cache)
        stats = offload.stats()
        report.put(f"check {slots} slots", equal=equal, close=close, of=total, hits=stats.hits, misses=stats.misses)
        assert close == total, "offload and resident differ"


def held_right(cache: SlotCache) -> None:
    """Every slot holds, bit for bit, the expert that the tables say."""
    experts = cache.group.experts
    for slot, owner in enumerate(cache.owners()):
        if owner >= 0:
            host = cache.hosts[owner // experts].parts
            for name, part in cache.bank.items():
                assert torch.equal(part[slot].cpu(), host[name][owner % experts]), f"slot {slot}, {name}"


def link(scale: Scale, report: Report) -> float:
    """Bytes a second: the copy engine over 1 GiB, and the fetch kernel over eight experts, in several shapes."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    there.copy_(host, non_blocking=True)
    took = min(seconds(partial(there.copy_, host, non_blocking=True)) for _ in range(5))
    report.put("copy engine", gb_s=host.numel() / took / 1e9)
    part = BankPart("expert", "int32", (scale.expert_bytes // 4,))
    count = 64
    bank, pinned = (t.view(torch.int32)[: count * part.shape[0]].view(count, -1) for t in (there, host))
    state = make_state(1, count, count, torch.device("cuda"))
    state.lists[0] = 8
    state.fetch_experts[:8] = torch.arange(0, count, 8, device="cuda")
    state.fetch_slots[:8] = torch.arange(8, device="cuda")
    declared = launches.fetch(part, state.room, make_device("cuda").multiprocessors, True)
    constexprs = dict(declared.constexprs)
    for programs in (16, 32, 64, 132, 264, 528):
        for block, warps in ((1024, 4), (4096, 8), (8192, 8)):
            shape = tuple({**constexprs, "BLOCK": block}.items())
            launch = bind(evolve(declared, constexprs=shape, grid=(programs, 1, 1), num_warps=warps))
            run = partial(launch, pinned, bank, state.lists, state.counters)
            run()
            took = seconds(lambda run=run: [run() for _ in range(20)]) / 20  # type: ignore[misc]
            chosen = (programs, block, warps) == (declared.grid[0], constexprs["BLOCK"], declared.num_warps)
            name = f"fetch {programs} x {4 * block} B, {warps} warps"
            report.put(name, gb_s=8 * scale.expert_bytes / took / 1e9, chosen=chosen)
    return host.numel() / min(seconds(partial(there.copy_, host, non_blocking=True)) for _ in range(5))


def seconds(do: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    do()
    synchronize()
    return time.perf_counter() - start


def decode(scale: Scale, report: Report, rate: float) -> None:
    """Captured steps of the expert layers, one after the other."""
    for policy in POLICIES:
        strategy = OffloadExperts(setup_of(scale, slots=scale.slots, policy=policy))
        fill(scale, strategy)
        for zipf in (0.0, 1.0):
            for tokens in (1, 16):
                decode_case(scale, report, rate, strategy, policy, zipf, tokens)
        del strategy


def decode_case(
    scale: Scale, report: Report, rate: float, strategy: Any, policy: str, zipf: float, tokens: int
) -> None:
    steps = scale.decode_steps
    plan = routing(scale, 2 * steps, tokens, zipf, 7)
    experts = plan[0].clone()
    hidden, weights = inputs_of(scale, tokens)

    def body() -> Tensor:
        out = hidden
        for layer in range(scale.layers):
            out = strategy.finish(strategy.start(layer, out, weights, experts[layer]))
        return out

    strategy.begin_step(batch_of(tokens, True, scale.device))
    with strategy.rehearse():
        body()
    replay: Callable[[], object] = body
    if scale.device == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), strategy.rehearse():
            body()
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        replay = graph.replay

    def run(first: int) -> None:
        for step in range(first, first + steps):
            experts.copy_(plan[step])
            replay()

    run(0)
    before = strategy.stats()
    took = seconds(lambda: run(steps))
    after = strategy.stats()
    moved = after.moved_bytes["decode"] - before.moved_bytes["decode"]
    looked = after.hits + after.misses - before.hits - before.misses
    again = seconds(lambda: [replay() for _ in range(steps)])  # the last routing again: nothing is missing
    strategy.end_step()
    layers = steps * scale.layers
    report.put(
        f"decode {policy} zipf {zipf:g} x{tokens}",
        us_a_layer=took / layers * 1e6,
        us_all_hit=again / layers * 1e6,
        hit_rate=(after.hits - before.hits) / looked,
        link_share=moved / took / rate,
        gb_s=moved / took / 1e9,
        stall_share=(after.stall_ms - before.stall_ms) / took / 1e3,
    )


# ------------------------------------------------------------------------------------------- whole engines


@contextmanager
def engine(scale: Scale, directory: Path, strategy: str, **options: Any) -> Iterator[LLM]:
    given = {"moe-offload": options} if strategy == "offload" else {}
    dtype = "bfloat16" if scale.device == "cuda" else "float32"
    with LLM(
        str(directory), device=scale.device, dtype=dtype, load_format="dummy" if scale.device == "cuda" else "auto",
        moe_strategy=strategy, max_seq_len=2 * scale.prompt, max_prefill_tokens=scale.chunk, max_running_requests=8,
        prefix_cache=False, kv_tokens=4 * scale.prompt, plugin_options=given,
    ) as llm:  # fmt: skip
        yield llm
    synchronize()


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(10, 250, (n,), generator=generator).tolist() for n in lengths]


def model(scale: Scale, report: Report, rate: float, directory: Path) -> None:
    write(scale, directory)
    wanted = prompts_of(1, scale.chunk // 8, scale.chunk, scale.prompt)
    with engine(scale, directory, "resident") as llm:
        expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in wanted]
        report.put("resident", **long_prompt(scale, llm, rate), **streams(scale, llm, 1))
    with engine(scale, directory, "offload", slots=scale.slots) as llm:
        moved = llm.running.built.moe.stats().moved_bytes
        report.put("moved by the start", **moved)
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in wanted]
        together = [c.token_ids for c in llm.generate(wanted, GREEDY)]
        report.put("tokens as resident", alone=alone == expected, together=together == expected)
        for count in (1, 16 if scale.device == "cuda" else 2):
            report.put(f"offload decode x{count}", **streams(scale, llm, count, rate))
        for turn in range(3):
            report.put(f"offload prompt {turn}", **long_prompt(scale, llm, rate, seed=turn))
        report.put("offload prompt beside decodes", **crowded_prompt(scale, llm))
        assert alone == expected, "tokens differ"
    with engine(scale, directory, "offload", slots=scale.slots, window_tokens=1) as llm:
        report.put("chunk by chunk", **long_prompt(scale, llm, rate))


def write(scale: Scale, directory: Path) -> None:
    if scale.device == "cpu":
        from freetoken.models import qwen3_moe
        from freetoken.testing.checkpoints import write_tiny

        write_tiny(qwen3_moe.FAMILY, directory)
        return
    from gpu_serve import write_model

    write_model("30", directory, scale.layers)


def long_prompt(scale: Scale, llm: LLM, rate: float, seed: int = 0) -> dict[str, float]:
    """Time to first token, and as a multiple of moving all the experts once (a prompt this long is routed to all)."""
    prompt = prompts_of(scale.prompt + seed)[0][: scale.prompt]
    strategy = llm.running.built.moe
    before = strategy.stats()
    took = seconds(lambda: llm.generate([prompt], evolve(GREEDY, max_tokens=1)))
    after = strategy.stats()
    moved = after.moved_bytes["prefill"] - before.moved_bytes["prefill"]
    experts = scale.layers * scale.experts * scale.expert_bytes
    return {
        "ttft_s": took, "times_moving_all_once": took * rate / experts, "moved_share": moved / experts,
        "stall_ms": after.stall_ms - before.stall_ms,
    }  # fmt: skip


def streams(scale: Scale, llm: LLM, count: int, rate: float = 0.0) -> dict[str, float]:
    """Tokens a second of ``count`` requests at once, after their first."""
    count = min(count, llm.plan.max_running_requests)
    core, strategy = llm.running.core, llm.running.built.moe
    steps = scale.decode_steps // 2
    for index, prompt in enumerate(prompts_of(*range(20, 20 + count))):
        core.submit(f"stream-{index}", prompt, evolve(GREEDY, max_tokens=steps))
    first: set[str] = set()
    while len(first) < count:
        first |= {output.request_id for output in core.step() if output.tokens}
    before, start, tokens = strategy.stats(), time.perf_counter(), 0
    while not core.idle:
        tokens += sum(len(output.tokens) for output in core.step())
    took = time.perf_counter() - start
    moved = strategy.stats().moved_bytes["decode"] - before.moved_bytes["decode"]
    share = {"link_share": moved / took / rate} if rate else {}
    return {"tokens_s": tokens / took, "ms_a_step": took / max(tokens, 1) * count * 1e3, **share}


def crowded_prompt(scale: Scale, llm: LLM) -> dict[str, float]:
    """The long prompt while four others decode: its time to first token, and the others' longest gaps."""
    core = llm.running.core
    for index, prompt in enumerate(prompts_of(30, 31, 32, 33)):
        core.submit(f"small-{index}", prompt, evolve(GREEDY, max_tokens=4 * scale.decode_steps))
    last: dict[str, float] = {}
    while len(last) < 4:
        last.update({o.request_id: time.perf_counter() for o in core.step() if o.tokens})
    core.submit("large", prompts_of(scale.prompt)[0], evolve(GREEDY, max_tokens=1))
    start, gap, count, ttft = time.perf_counter(), 0.0, 0, 0.0
    while not ttft and not core.idle:
        for output in core.step():
            now = time.perf_counter()
            if output.request_id == "large":
                ttft = now - start
            elif output.tokens:
                gap = max(gap, now - last[output.request_id])
                last[output.request_id] = now
                count += 1
    for index in range(4):
        core.abort(f"small-{index}")
    while not core.idle:
        core.step()
    return {"ttft_s": ttft, "longest_gap_s": gap, "allowed_gap_s": core.limits.max_gap_ms / 1e3, "tokens_beside": count}


# ------------------------------------------------------------------------------------------- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    scale = toy() if given.device == "cpu" else big(given.layers)
    report = Report(given.json)
    parts = given.parts.split(",")
    rates = [55.4e9]
    torch.set_grad_enabled(False)
    if "link" in parts and scale.device == "cuda":
        report.part("link", lambda: rates.append(link(scale, report)))
    if "check" in parts:
        report.part("check", lambda: check(scale, report))
    if "decode" in parts:
        report.part("decode", lambda: decode(scale, report, rates[-1]))
    if "model" in parts:
        with tempfile.TemporaryDirectory() as directory:
            report.part("model", lambda: model(scale, report, rates[-1], Path(directory) / "model"))
    print("failed:", ", ".join(report.failed) or "nothing")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
