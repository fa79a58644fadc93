"""Declared launch spaces against traces of the real call sites, under the core's stub driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from freetoken.plugin.protocols import KernelSetup
from freetoken.testing.launches import LaunchSpaceConformance
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launches, StepPoint
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.spec import SPECS

BF16 = torch.bfloat16


def _load(shape: OpShape, device: Device) -> Any:
    spec = next(s for s in SPECS if s.op == shape.op)
    assert spec.serves(shape)
    return spec.load(KernelSetup(shape, device, shape.dtype, lambda stored: stored.parts["data"])).call


def _rows(*shape: int, wide: int = 0) -> torch.Tensor:
    """Tensors of which only strides and dtype matter; ``wide`` makes rows longer than they are read."""
    return torch.empty(shape[0], shape[1] + wide, dtype=BF16)[:, : shape[1]]


class Traced(LaunchSpaceConformance):
    """``op`` at ``sizes``; ``call`` is the real call with tensors of the step's size."""

    op: str
    sizes: tuple[dict[str, Any], ...]
    dtype = "bfloat16"

    def shapes(self):
        return [OpShape(self.op, self.dtype, **size) for size in self.sizes]

    def launches(self) -> Launches:
        found = next(s for s in SPECS if s.op == self.op).launches
        assert found is not None
        return found

    def call(self, point: StepPoint, shape: OpShape, device: Device) -> None:
        self.run(_load(shape, device), point, shape)

    def run(self, call: Any, point: StepPoint, shape: OpShape) -> None:
        raise NotImplementedError


class TestRmsNorm(Traced):
    op = "rms_norm"
    sizes = ({"cols": 2048}, {"cols": 128, "q_heads": 4, "kv_heads": 2})

    def run(self, call, point, shape):
        for groups in (shape.q_heads, shape.kv_heads) if shape.q_heads else (1,):
            x = _rows(point.tokens, groups * shape.cols, wide=64).view(point.tokens, groups, shape.cols)
            call(x, torch.empty(shape.cols, dtype=BF16), 1e-5)


class TestAddRmsNorm(Traced):
    op = "add_rms_norm"
    sizes = ({"cols": 2048},)

    def run(self, call, point, shape):
        x = _rows(point.tokens, shape.cols)
        call(x, _rows(point.tokens, shape.cols, wide=8), torch.empty(shape.cols, dtype=BF16), 1e-6)


class TestGatedRmsNorm(Traced):
    op = "gated_rms_norm"
    sizes = ({"cols": 128, "kv_heads": 4, "v_dim": 128},)

    def run(self, call, point, shape):
        x = torch.empty(point.tokens, 4, 128, dtype=BF16)
        gate = _rows(point.tokens, 512, wide=512).view(point.tokens, 4, 128)
        call(x, gate, torch.empty(128, dtype=BF16), 1e-6)


class TestL2Norm(Traced):
    op = "l2norm"
    sizes = ({"cols": 128, "q_heads": 2, "head_dim": 128},)

    def run(self, call, point, shape):
        call(_rows(point.tokens, 256, wide=256).view(point.tokens, 2, 128), 1e-6)


class TestRope(Traced):
    op = "rope"
    sizes = ({"q_heads": 16, "kv_heads": 2, "head_dim": 256, "rotary_dim": 64},)

    def run(self, call, point, shape):
        q = _rows(point.tokens, 16 * 256, wide=2048).view(point.tokens, 16, 256)
        k = torch.empty(point.tokens, 2, 256, dtype=BF16)
        call(q, k, torch.zeros(point.tokens, dtype=torch.int64), torch.empty(100, 64))


class TestSiluAndMul(Traced):
    op = "silu_and_mul"
    sizes = ({"intermediate": 512},)

    def run(self, call, point, shape):
        call(_rows(point.tokens, 1024))


class TestWriteKv(Traced):
    op = "write_kv"
    sizes = ({"kv_heads": 2, "head_dim": 256, "v_dim": 256},)

    def run(self, call, point, shape):
        k = _rows(point.tokens, 512, wide=512).view(point.tokens, 2, 256)
        pool = torch.empty(30, 16, 2, 256, dtype=BF16)
        call(k, k, pool, pool, torch.zeros(point.tokens, dtype=torch.int64))


class TestRopeWrite(Traced):
    op = "rope_write"
    sizes = (
        {"q_heads": 16, "kv_heads": 2, "head_dim": 256, "v_dim": 256, "rotary_dim": 64, "cols": 256},
        {"q_heads": 9, "kv_heads": 3, "head_dim": 64, "v_dim": 64, "rotary_dim": 64},
    )

    def run(self, call, point, shape):
        dim, heads = shape.head_dim, shape.kv_heads
        q = _rows(point.tokens, shape.q_heads * dim, wide=2048).view(point.tokens, shape.q_heads, dim)
        k = _rows(point.tokens, heads * dim, wide=512).view(point.tokens, heads, dim)
        weights = (torch.empty(dim, dtype=BF16),) * 2 if shape.cols else (None, None)
        pool, where = torch.empty(30, 16, heads, dim, dtype=BF16), torch.zeros(point.tokens, dtype=torch.int64)
        call(q, k, k, *weights, 1e-5, where, torch.empty(100, shape.rotary_dim), pool, pool, where)


class TestRouterTopk(Traced):
    op = "router_topk"
    sizes = ({"experts": 256, "top_k": 8},)

    def run(self, call, point, shape):
        call(_rows(point.tokens, 256), 8, bool(point.tokens % 2))


class TestLinear(Traced):
    op = "linear"
    sizes = ({"rows": 1, "cols": 64}, {"rows": 640, "cols": 2048}, {"rows": 64, "cols": 512})

    def run(self, call, point, shape):
        call(torch.zeros(point.tokens, shape.cols, dtype=BF16), torch.zeros(shape.rows, shape.cols, dtype=BF16))


class TestExperts(Traced):
    op = "experts"
    sizes = ({"cols": 64, "intermediate": 32, "experts": 8, "top_k": 4},)

    def run(self, call, point, shape):
        bank = {"gate_up": torch.empty(8, 64, 64, dtype=BF16), "down": torch.empty(8, 64, 32, dtype=BF16)}
        slots = torch.zeros(point.tokens, 4, dtype=torch.int32)
        call(_rows(point.tokens, 64), torch.empty(point.tokens, 4), slots, bank)


def _ragged(point: StepPoint) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = torch.zeros(point.sequences + 1, dtype=torch.int32)
    return starts, torch.zeros(point.sequences, dtype=torch.int64), starts[:-1].clone()


class TestCausalConv(Traced):
    op = "causal_conv"
    sizes = ({"rows": 512, "width": 4},)

    def run(self, call, point, shape):
        state, weight = torch.empty(3, 512, 3), torch.empty(512, 4, dtype=BF16)
        call(_rows(point.tokens, 512, wide=256), weight, state, *_ragged(point))


class TestGatedDelta(Traced):
    op = "gated_delta"
    sizes = ({"q_heads": 2, "kv_heads": 4, "head_dim": 64, "v_dim": 64},)

    def run(self, call, point, shape):
        q = torch.empty(point.tokens, 2, 64, dtype=BF16)
        v = _rows(point.tokens, 256, wide=256).view(point.tokens, 4, 64)
        gates = torch.empty(point.tokens, 4)
        call(q, q, v, gates, gates, torch.empty(3, 4, 64, 64), *_ragged(point))


class TestResidualAdd(Traced):
    op = "residual_add"
    sizes = ({"cols": 2048}, {"cols": 2048, "rows": 1})

    def run(self, call, point, shape):
        x = _rows(point.tokens, shape.cols, wide=64)
        call(x, x, *((x, torch.empty(point.tokens, 1, dtype=BF16)) if shape.rows else (None, None)))


class TestSigmoidGate(Traced):
    op = "sigmoid_gate"
    sizes = ({"cols": 256, "q_heads": 16},)

    def run(self, call, point, shape):
        gate = torch.empty(point.tokens, 16, 512, dtype=BF16)[..., 256:]
        call(torch.empty(point.tokens, 16, 256, dtype=BF16), gate)


class TestDeltaGates(Traced):
    op = "delta_gates"
    sizes = ({"kv_heads": 32},)

    def run(self, call, point, shape):
        call(_rows(point.tokens, 64), torch.empty(32), torch.empty(32))


class TestDeltaNet(Traced):
    op = "delta_net"
    sizes = ({"q_heads": 2, "kv_heads": 4, "head_dim": 64, "v_dim": 64},)

    def run(self, call, point, shape):
        floats, state = torch.empty(4), torch.empty(3, 4, 64, 64)
        call(_rows(point.tokens, 512, wide=64), _rows(point.tokens, 8), floats, floats, 1e-6, state, *_ragged(point))


class TestSample(Traced):
    op = "sample"
    sizes = ({"rows": 1000},)
    dtype = "float32"

    def run(self, call, point, shape):
        rows = point.rows
        floats = [torch.empty(rows) for _ in range(3)]
        ints = [torch.zeros(rows, dtype=torch.int64) for _ in range(2)]
        call(torch.empty(rows, 1000), floats[0], torch.zeros(rows, dtype=torch.int32), *floats[1:], *ints)


def test_every_op_is_traced():
    """Oracle: the plugin's own list; a new kernel needs a trace."""
    traced = {cls.op for cls in Traced.__subclasses__()}
    assert traced == {spec.op for spec in SPECS}
