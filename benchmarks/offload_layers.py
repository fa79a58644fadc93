"""Expert layers with the strategy ``offload`` alone, without a model: filling, checking, and timing decode steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor

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
from freetoken_moe_offload.launches import passes
from freetoken_moe_offload.options import OffloadOptions
from freetoken_moe_offload.strategy import OffloadExperts


class Report(Protocol):
    def put(self, name: str, **values: Any) -> None: ...


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
    def all_bytes(self) -> int:
        return self.layers * self.experts * self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * (2 if self.device == "cuda" else 4)


def big(layers: int) -> Scale:
    return Scale("cuda", layers, 128, 8, 2048, 768, 12_288, 4096, 300, (1, 2, 5, 16, 64, 119, 700, 4096))


def toy() -> Scale:
    return Scale("cpu", 2, 8, 2, 128, 64, 48, 16, 10, (1, 2, 5, 40))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(do: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    do()
    synchronize()
    return time.perf_counter() - start


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
    """Outputs of one layer after another, decode and prefill, at several numbers of slots.

    A step of one pass must equal resident bit for bit: the kernels choose their tiles by the number of tokens, a pair's
    row does not depend on the rows beside it, and a token's parts are summed in the order of its own experts, so which
    slot an expert lies in changes nothing. A step that wants more experts than there are slots takes several passes,
    whose results are rounded to the dtype before they are summed: those must be close.
    """
    few = evolve(scale, layers=min(scale.layers, 2))
    wanted = (few.experts + few.experts // 2, few.experts, few.top_k + 1)
    resident = ResidentExperts(setup_of(few))
    offloads = {slots: OffloadExperts(setup_of(few, slots=slots)) for slots in wanted}
    fill(few, resident, *offloads.values())
    wrong = []
    for slots, offload in offloads.items():
        counts = {"one_pass": 0, "equal": 0, "several": 0, "close": 0}
        for tokens in few.check_tokens:
            hidden, weights = inputs_of(few, tokens)
            single = passes(tokens * few.top_k, few.experts, slots) == 1
            for step, experts in enumerate(routing(few, 3, tokens, 0.5, tokens)):
                for layer in range(few.layers):
                    decode = tokens <= 64 and step % 2 == 0
                    expected = one_step(resident, layer, hidden, weights, experts[layer], decode)
                    out = one_step(offload, layer, hidden, weights, experts[layer], decode)
                    error = (out.float() - expected.float()).abs().max() / expected.float().abs().max()
                    counts["one_pass" if single else "several"] += 1
                    good = torch.equal(out, expected) if single else error.item() < 0.02
                    counts["equal" if single else "close"] += good
                    if not good:
                        wrong.append(f"{slots} slots, {tokens} tokens: {error.item():.3g}")
        for cache in offload._caches:
            held_right(cache)
        stats = offload.stats()
        report.put(f"check {slots} slots", **counts, hits=stats.hits, misses=stats.misses)
    assert not wrong, f"offload and resident differ: {wrong[:5]}"


def held_right(cache: SlotCache) -> None:
    """Every slot holds, bit for bit, the expert that the tables say."""
    experts = cache.group.experts
    for slot, owner in enumerate(cache.owners()):
        if owner >= 0:
            host = cache.hosts[owner // experts].parts
            for name, part in cache.bank.items():
                assert torch.equal(part[slot].cpu(), host[name][owner % experts]), f"slot {slot}, {name}"


def link_rate(scale: Scale) -> float:
    """Bytes a second of the copy engine from pinned memory, the best of five."""
    if scale.device == "cpu":
        return 10e9
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    there.copy_(host, non_blocking=True)
    return host.numel() / min(seconds(partial(there.copy_, host, non_blocking=True)) for _ in range(5))


def fetch_rates(scale: Scale, report: Report) -> None:
    """The fetch kernel over eight experts, in several shapes."""
    if scale.device == "cpu":
        return
    part = BankPart("expert", "int32", (scale.expert_bytes // 4,))
    count = 64
    pinned = torch.empty(count, part.shape[0], dtype=torch.int32, pin_memory=True)
    bank = torch.empty_like(pinned, device="cuda")
    state = make_state(1, count, count, torch.device("cuda"))
    state.lists[0] = 8
    state.fetch_experts[:8] = torch.arange(0, count, 8, device="cuda")
    state.fetch_slots[:8] = torch.arange(8, device="cuda")
    declared = launches.fetch(part, state.room, make_device("cuda").multiprocessors, True)
    constexprs = dict(declared.constexprs)
    for programs in (32, 132, 264, 528):
        for block, warps in ((1024, 4), (4096, 8), (8192, 8)):
            shape = tuple({**constexprs, "BLOCK": block}.items())
            launch = bind(evolve(declared, constexprs=shape, grid=(programs, 1, 1), num_warps=warps))
            run = partial(launch, pinned, bank, state.lists, state.counters)
            run()
            took = seconds(lambda run=run: [run() for _ in range(20)]) / 20  # type: ignore[misc]
            chosen = (programs, block, warps) == (declared.grid[0], constexprs["BLOCK"], declared.num_warps)
            name = f"fetch {programs} x {4 * block} B, {warps} warps"
            report.put(name, gb_s=8 * scale.expert_bytes / took / 1e9, chosen=chosen)


def decode_case(
    scale: Scale, report: Report, rate: float, strategy: Any, policy: str, zipf: float, tokens: int
) -> None:
    steps = scale.decode_steps if tokens == 1 else max(scale.decode_steps // 4, 2)
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
