"""The declared launches against traces of the call sites, and compiled for cards that people own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")

from freetoken.ops.triton_stub import Target, compile_request
from freetoken.plugin.protocols import BankPart, ExpertLayer, MoESetup
from freetoken.testing.launches import DEVICES, LaunchSpaceConformance
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.model_spec import MoEShape
from freetoken.vocab.ops import OpShape
from freetoken.warmup.compile_worker import compile_requests
from freetoken_moe_offload.device_index import KernelFetch, KernelIndex
from freetoken_moe_offload.index import make_state
from freetoken_moe_offload.launches import Shape, half_life, launches
from freetoken_moe_offload.options import OffloadOptions

LAYOUT = (BankPart("gate_up", "bfloat16", (64, 32)), BankPart("scale", "uint8", (3,)))
SHAPE = MoEShape(layers=(0, 1, 2), experts=20, top_k=4, hidden=32, intermediate=32)
OP = OpShape("experts", "bfloat16", cols=32, intermediate=32, experts=20, top_k=4)


def setup_of(slots: int, policy: str = "lfu-decay") -> MoESetup:
    layers = tuple(ExpertLayer(layer, LAYOUT) for layer in SHAPE.layers)
    options = OffloadOptions(slots=slots, policy=policy)
    return MoESetup(SHAPE, layers, DEVICES["h200"], "bfloat16", 300, 20, 1 << 30, 1 << 30, options, 1000)


class Traced(LaunchSpaceConformance):
    """``slots`` as many as given; the call is what ``SlotCache.bring`` does for each pass."""

    slots: int
    policy = "lfu-decay"

    def shapes(self):
        return [OP]

    def launches(self):
        if not hasattr(self, "_launches"):
            type(self)._launches = staticmethod(launches(setup_of(self.slots, self.policy)))
        return self._launches

    def call(self, point: StepPoint, shape: OpShape, device: Device) -> None:
        sizes = Shape(SHAPE.experts, self.slots, self.policy != "lru", half_life(3))
        index = KernelIndex(sizes)
        state = make_state(3, SHAPE.experts, self.slots, torch.device("cpu"))
        fetch = KernelFetch(LAYOUT, state.room, device.multiprocessors, timed=True)
        bank = {p.name: torch.zeros(self.slots, *p.shape, dtype=getattr(torch, p.dtype)) for p in LAYOUT}
        host = {p.name: torch.zeros(SHAPE.experts, *p.shape, dtype=getattr(torch, p.dtype)) for p in LAYOUT}
        experts = torch.zeros(point.tokens, SHAPE.top_k, dtype=torch.int32)
        decode = point.max_query == 1
        passes = -(-min(experts.numel(), SHAPE.experts) // self.slots)
        for number in range(passes):
            index.look_up(
                state, experts, 0, first=number * self.slots, final=number == passes - 1, touch=decode,
                keep=not decode, cause=0 if decode else 1,
            )  # fmt: skip
            if decode:
                fetch.run(state, host, bank)


class TestAPassAStep(Traced):
    slots = 33


class TestSeveralPasses(Traced):
    slots = 7
    policy = "lru"


def test_nothing_is_launched_on_a_cpu() -> None:
    """Oracle: the kernels need a GPU; a CPU's warmup must not be told of them."""
    cpu = evolve(setup_of(9), device=Device())
    point = StepPoint(5, 1, 5, 5, 1, False)
    assert launches(cpu)(point, OP, Device()) == ()


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: ptxas for several cards, and the shared memory a block may have."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    points = (StepPoint(1, 1, 1, 9, 1, True), StepPoint(300, 1, 300, 300, 1, False))
    wanted = [(card, x) for card in ("h200", "rtx4090") for p in points
              for x in launches(setup_of(33))(p, OP, DEVICES[card])]  # fmt: skip
    report = compile_requests([compile_request(x, Target.of(DEVICES[card])) for card, x in wanted], workers=1)
    assert report.errors == ()
    for (card, launch), result in zip(wanted, report.results, strict=True):
        assert result.shared_memory_bytes <= DEVICES[card].shared_memory_bytes, launch.kernel
