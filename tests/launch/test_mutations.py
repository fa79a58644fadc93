"""Mutations of call sites: each makes a kernel's call launch what is not declared, and the trace must say so.

What the trace compares is in ``freetoken.testing.launch_trace``. That nothing differs without a mutation is tested here
on the same few steps, so that it is the mutation that makes the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")
pytest.importorskip("freetoken_kernels_triton")
pytest.importorskip("freetoken_attention_triton")

import trace_launches

from freetoken.models.attention_block import AttentionBlock
from freetoken.models.decoder_model import DecoderModel
from freetoken.models.moe_block import MoEBlock
from freetoken.ops import triton_launch
from freetoken.vocab.errors import EngineError
from freetoken.vocab.launch import TensorArg, TritonLaunch
from freetoken_attention_triton import backend
from freetoken_attention_triton.launches import Splits
from freetoken_kernels_triton import (
    add_rms_norm,
    causal_conv,
    experts,
    gated_delta,
    l2norm,
    linear,
    rms_norm,
    rope_write,
    router_topk,
    sample,
    silu_and_mul,
    spec,
)
from freetoken_kernels_triton.rms_norm_kernel import rms_norm_kernel

COUNTS = (1, 2, 5, 16, 17, 63, 65, 700)
MODEL = "qwen3.6-35b-a3b"  # the one with every op
SAID = ": launched ["
Mutate = Callable[[TritonLaunch], TritonLaunch]


def differences(counts: tuple[int, ...] = COUNTS) -> tuple[str, ...]:
    return trace_launches.walk(trace_launches.make_trace(MODEL), counts, most_differences=1).differences


def test_without_a_mutation_nothing_differs() -> None:
    assert differences() == ()


def constexpr(name: str, change: Callable[[Any], Any]) -> Mutate:
    """Another value of one compile-time parameter."""

    def mutate(launch: TritonLaunch) -> TritonLaunch:
        assert name in dict(launch.constexprs), f"{launch.kernel} has no {name}"
        return evolve(launch, constexprs=tuple((n, change(v) if n == name else v) for n, v in launch.constexprs))

    return mutate


def argument(name: str, change: Callable[[Any], Any]) -> Mutate:
    """Another value of one run-time parameter."""

    def mutate(launch: TritonLaunch) -> TritonLaunch:
        assert name in dict(launch.args), f"{launch.kernel} has no {name}"
        return evolve(launch, args=tuple((n, change(v) if n == name else v) for n, v in launch.args))

    return mutate


def options(**changes: int) -> Mutate:
    return lambda launch: evolve(launch, **changes)


def twice(value: int) -> int:
    return 2 * value


def per_length(launch: TritonLaunch) -> TritonLaunch:
    """The row block follows the number of rows: a compiled kernel for every few lengths."""
    rows = int(dict(launch.args)["rows"])  # type: ignore[arg-type]
    return constexpr("BLOCK_ROWS", lambda _: 1 << max(rows - 1, 1).bit_length())(launch)


def half_the_keys(launch: TritonLaunch) -> TritonLaunch:
    return launch if launch.kernel.endswith(":combine") else constexpr("BLOCK_N", lambda v: v // 2)(launch)


CALL_SITES: dict[str, tuple[ModuleType, str, Mutate]] = {
    "a constexpr of rms_norm": (rms_norm, "memoised", constexpr("BLOCK_ROWS", twice)),
    "a constexpr of l2norm that follows the length": (l2norm, "memoised", per_length),
    "a constexpr of add_rms_norm": (add_rms_norm, "memoised", constexpr("BLOCK_N", twice)),
    "the warps of rope_write": (rope_write, "memoised", options(num_warps=8)),
    "the tile of linear": (linear, "memoised", constexpr("BLOCK_N", twice)),
    "the stages of experts": (experts, "bind", options(num_stages=2)),
    "the chunk of gated_delta": (gated_delta, "bind", constexpr("BLOCK_V", lambda v: v // 2)),
    "a 64-bit integer to causal_conv": (causal_conv, "memoised", argument("x_stride", lambda v: v + (1 << 33))),
    "a float where router_topk takes an integer": (router_topk, "memoised", argument("renormalise", float)),
    "the grid of silu_and_mul": (silu_and_mul, "memoised", lambda x: evolve(x, grid=(x.grid[0], 7, 1))),
    "the warps of sample": (sample, "bind", options(num_warps=4)),
    "attention's keys at a time": (backend, "bind", half_the_keys),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(CALL_SITES))
def test_a_launch_changed_at_its_call_site_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the call binds is changed; the declaration stays as it is."""
    module, binder, mutate = CALL_SITES[what]
    if binder == "bind":
        monkeypatch.setattr(module, "bind", lambda launch: triton_launch.bind(mutate(launch)))
    else:
        monkeypatch.setattr(
            module, "memoised", lambda make, *rest: triton_launch.memoised(lambda *a: mutate(make(*a)), *rest)
        )
    found = differences()
    assert found, f"{what} was not noticed"
    assert SAID in found[0]


def test_a_dtype_changed_at_its_call_site_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call hands over 32-bit positions, and binds a launch that takes them."""
    narrow = argument("positions", lambda _: TensorArg("int32"))
    monkeypatch.setattr(rope_write, "memoised", lambda make: triton_launch.memoised(lambda *a: narrow(make(*a))))
    forward = AttentionBlock.forward

    def with_narrow_positions(self: AttentionBlock, x: Any, step: Any) -> Any:
        return forward(self, x, evolve(step, batch=evolve(step.batch, positions=step.batch.positions.int())))

    monkeypatch.setattr(AttentionBlock, "forward", with_narrow_positions)
    assert SAID in differences()[0]


def test_a_tensor_of_another_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model computes in float16 what is declared in bfloat16: the bound launch itself refuses."""
    begin = MoEBlock.begin
    monkeypatch.setattr(MoEBlock, "begin", lambda self, x: begin(self, x.half()))
    found = differences((2,))
    assert found[0].startswith(EngineError.__name__)
    assert "torch.float16" in found[0]


def test_a_tensor_off_its_alignment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that start two bytes later: the alignment that every key assumes is broken."""
    norm = rms_norm.load

    def shifted(setup: Any) -> Any:
        loaded = norm(setup)

        def call(x: Any, weight: Any, eps: float) -> Any:
            return loaded.call(
                torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape), weight, eps
            )

        return evolve(loaded, call=call)

    specs = [evolve(s, load=shifted) if s.op == "rms_norm" else s for s in spec.SPECS]
    monkeypatch.setattr(spec, "SPECS", tuple(specs))
    found = differences((5,))
    assert found[0].startswith(EngineError.__name__)
    assert "2 bytes past a multiple of 16" in found[0]


def test_a_call_that_never_splits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan at the call site decides otherwise than the declaration does."""
    decided = backend.splits

    def never(*sizes: Any) -> Splits:
        parts = decided(*sizes)
        return Splits(min(parts.prefill, 1), min(parts.decode, 1))

    monkeypatch.setattr(backend, "splits", never)
    assert SAID in differences()[0]


def test_a_launch_that_nobody_declared_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that starts a kernel by itself, past every declaration."""
    head = DecoderModel.head

    def with_one_more(self: DecoderModel, rows: Any) -> Any:
        rms_norm_kernel[(1,)](
            rows, self.final_norm, rows, rows.shape[0], 1, rows.shape[1], 0, 1e-5, N=rows.shape[1], BLOCK_ROWS=1,
            BLOCK_N=4096, PDL=False,
        )  # fmt: skip
        return head(self, rows)

    monkeypatch.setattr(DecoderModel, "head", with_one_more)
    assert "head at" in differences((3,))[0]


def test_a_declared_key_that_is_never_launched_is_named() -> None:
    """Steps of many tokens alone leave the kernels of few tokens unmet."""
    trace = trace_launches.make_trace(MODEL)
    found = trace_launches.walk(trace, (700, 701))
    assert found.differences == ()
    unmet = trace.space.keys("layers.0", trace.point((trace_launches.Share(3),))) - found.keys
    assert any("skinny_gemm_kernel" in key for key in unmet)
