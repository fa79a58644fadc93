"""The norms against transformers' modules and torch's own."""

from __future__ import annotations

import pytest
import torch

from freetoken.ops.norms import add_rms_norm, gated_rms_norm, l2norm, rms_norm
from freetoken.testing.fakes import normal
from freetoken.testing.tolerances import assert_close

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 5, 128)])
def test_rms_norm(dtype: str, shape: tuple[int, ...]) -> None:
    """Oracle: torch's rms_norm in float64."""
    randn = normal(1, dtype=getattr(torch, dtype))
    x, weight = 4 * randn(*shape), randn(shape[-1])
    expected = torch.nn.functional.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == x.dtype
    assert_close(out, expected, dtype, shape[-1])


def test_rms_norm_equals_the_llama_module() -> None:
    """Oracle: transformers' LlamaRMSNorm in float32."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    randn = normal(2)
    module = LlamaRMSNorm(96, eps=1e-6)
    module.weight.data.copy_(randn(96))
    x = randn(5, 96)
    assert_close(rms_norm(x, module.weight.detach(), 1e-6), module(x), "float32", 96)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: str) -> None:
    """Oracle: the sum rounded to the compute dtype, then torch's rms_norm in float64."""
    randn = normal(3, dtype=getattr(torch, dtype))
    x, residual, weight = randn(6, 80), randn(6, 80), randn(80)
    normed, summed = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(summed, x + residual)
    expected = torch.nn.functional.rms_norm(summed.double(), (80,), weight.double(), 1e-6)
    assert_close(normed, expected, dtype, 80)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm(dtype: str) -> None:
    """Oracle: transformers' Qwen3NextRMSNormGated, in float32 on the rounded inputs."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    randn = normal(4, dtype=getattr(torch, dtype))
    x, gate, weight = randn(5, 3, 64), randn(5, 3, 64), randn(64)
    module = Qwen3NextRMSNormGated(64, eps=1e-6)
    module.weight.data.copy_(weight)
    out = gated_rms_norm(x, gate, weight, 1e-6)
    assert out.dtype == x.dtype
    assert_close(out, module(x.float(), gate.float()), dtype, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(dtype: str) -> None:
    """Oracle: the formula in float64."""
    x = normal(5, dtype=getattr(torch, dtype))(4, 3, 128)
    wide = x.double()
    expected = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)
    assert_close(l2norm(x, 1e-6), expected, dtype, 128)


def test_l2norm_of_nothing_is_nothing() -> None:
    """Oracle: the formula: eps keeps a row of zeros finite."""
    assert torch.equal(l2norm(torch.zeros(2, 1, 8), 1e-6), torch.zeros(2, 1, 8))
