"""The kernel suite catches the faults it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

from freetoken.builtin.kernels_torch import freetoken_kernels
from freetoken.ops.reference import REFERENCE
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.plugin.specs import KernelSpec
from freetoken.testing.kernels import KernelCase, KernelConformance, _in_place_positions
from freetoken.testing.op_cases import OP_CASES
from freetoken.vocab.ops import OPS


def spec_of(op: str) -> KernelSpec:
    return next(s for s in freetoken_kernels() if s.op == op)


def with_call(op: str, call: Callable[..., Any]) -> KernelSpec:
    good = spec_of(op)

    def load(setup: KernelSetup) -> LoadedKernel:
        return evolve(good.load(setup), call=call)

    return evolve(good, load=load)


def case(spec: KernelSpec, dtype: str = "float32") -> KernelCase:
    shape = OP_CASES[spec.op].shapes(spec.op, dtype)[0]
    return KernelCase(spec, "cpu", KernelConformance._with_formats(spec, shape))


def forgets_eps(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return REFERENCE["rms_norm"](x, weight, 1e-2)


def writes_its_input(x: torch.Tensor) -> torch.Tensor:
    out = REFERENCE["silu_and_mul"](x)
    x[:, : out.shape[1]] = out
    return out


def shifts_the_state(*args: Any) -> torch.Tensor:
    out = REFERENCE["causal_conv"](*args)
    args[2].mul_(1.01)
    return out


def ignores_prefix(*args: Any) -> torch.Tensor:
    return REFERENCE["gated_delta"](*args[:-1], torch.ones_like(args[-1]))


def draws_by_row(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    steps = torch.arange(len(logits))
    return REFERENCE["sample"](logits, *rest[:-1], steps)


def skips_the_last_token(k: Any, v: Any, k_pool: Any, v_pool: Any, slots: Any) -> None:
    REFERENCE["write_kv"](k[:-1], v[:-1], k_pool, v_pool, slots[:-1])


def looks_at_the_batch(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return REFERENCE["linear"](x, packed) * (1 + 1e-3 * (len(x) == 1))


@pytest.mark.parametrize(
    ("op", "call", "test"),
    [
        ("rms_norm", forgets_eps, "test_equals_the_reference"),
        ("silu_and_mul", writes_its_input, "test_equals_the_reference"),
        ("causal_conv", shifts_the_state, "test_equals_the_reference"),
        ("gated_delta", ignores_prefix, "test_equals_the_reference"),
        ("sample", draws_by_row, "test_equals_the_reference"),
        ("sample", draws_by_row, "test_a_row_does_not_depend_on_its_batch"),
        ("write_kv", skips_the_last_token, "test_equals_the_reference"),
        ("linear", looks_at_the_batch, "test_a_row_does_not_depend_on_its_batch"),
    ],
)
def test_a_fault_is_caught(op: str, call: Callable[..., Any], test: str) -> None:
    """Oracle: the same test passes for the reference itself, and fails for the broken kernel."""
    suite = KernelConformance()
    getattr(suite, test)(case(spec_of(op)))
    with pytest.raises(AssertionError):
        getattr(suite, test)(case(with_call(op, call)))


def test_a_wrong_size_is_caught() -> None:
    """Oracle: the bytes that packing takes."""
    for op in ("linear", "embedding", "experts"):
        lying = evolve(spec_of(op), packed_bytes=lambda _: 1)
        with pytest.raises(AssertionError, match="declared 1"):
            KernelConformance().test_packs_what_it_declared(case(lying))


def test_a_view_of_the_checkpoint_is_caught() -> None:
    """Oracle: the storage of what was stored."""
    good = spec_of("embedding")
    lazy = evolve(good, load=lambda setup: evolve(good.load(setup), pack=lambda tensors: tensors[0].parts["data"]))
    with pytest.raises(AssertionError, match="view of the checkpoint"):
        KernelConformance().test_packs_what_it_declared(case(lazy))


def test_a_spec_that_serves_nothing_is_caught() -> None:
    """Oracle: the shapes tried, none of which has a declared dtype."""

    class Empty(KernelConformance):
        spec = "freetoken.builtin.kernels_torch:freetoken_kernels"
        dtypes = ("float64",)
        ops = ("rope",)

    with pytest.raises(AssertionError, match="serves none"):
        Empty.cases()


def test_every_op_has_cases() -> None:
    """Oracle: the vocabulary."""
    assert set(OP_CASES) == set(OPS)


def test_in_place_arguments_are_found_by_name() -> None:
    """Oracle: the signatures, read by eye."""
    assert _in_place_positions("write_kv") == {2, 3}
    assert _in_place_positions("causal_conv") == {2}
    assert _in_place_positions("gated_delta") == {5}
    assert _in_place_positions("rms_norm") == frozenset()
