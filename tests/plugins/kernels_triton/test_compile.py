"""A sample of the declared keys compiles without a GPU and stays within the card's shared memory.

``benchmarks/compile_all.py`` compiles all of them.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from freetoken.ops.triton_stub import Target, compile_request
from freetoken.testing.launches import DEVICES
from freetoken.vocab.launch import StepPoint, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken.warmup.compile_worker import compile_one
from freetoken_kernels_triton.spec import SPECS

SAMPLE = [
    ("h200", OpShape("rms_norm", "bfloat16", cols=2048), 119),
    ("rtx4090", OpShape("linear", "bfloat16", rows=5120, cols=2048), 16),
    ("a100", OpShape("experts", "bfloat16", cols=2048, intermediate=768, experts=128, top_k=8), 16),
    ("rtx5090", OpShape("experts", "float16", cols=2048, intermediate=512, experts=256, top_k=8), 1),
    ("h200", OpShape("causal_conv", "bfloat16", rows=8192, width=4), 119),
]


@pytest.mark.parametrize(("card", "shape", "tokens"), SAMPLE, ids=lambda v: getattr(v, "op", str(v)))
def test_declared_launches_compile(card, shape, tokens):
    """Oracle: Triton and ptxas for the card's architecture."""
    device = DEVICES[card]
    point = StepPoint(tokens, 1, tokens, tokens, 1, decode=False)
    declared = next(s for s in SPECS if s.op == shape.op).launches(point, shape, device)
    assert declared
    for launch in declared:
        assert isinstance(launch, TritonLaunch)
        result = compile_one(compile_request(launch, Target.of(device)))
        assert not result.error
        assert result.shared_memory_bytes <= device.shared_memory_bytes
