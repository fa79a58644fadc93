"""A sample of declared keys compiles for cards that people own. Oracle: ptxas, and each card's shared memory."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from freetoken.ops.triton_stub import Target, compile_request
from freetoken.testing.launches import DEVICES
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.ops import OpShape
from freetoken.warmup.compile_worker import compile_requests
from freetoken_attention_triton.launches import launches

PREFILL = StepPoint(8192, 1, 8192, 8192, 1, False)
DECODE = StepPoint(1, 1, 1, 40_000, 1, True)
SMALL = OpShape("attention", "float16", q_heads=9, kv_heads=3, head_dim=80, window=512, page_tokens=16)
QWEN3 = OpShape("attention", "bfloat16", q_heads=32, kv_heads=4, head_dim=128, page_tokens=16)
QWEN36 = OpShape("attention", "bfloat16", q_heads=16, kv_heads=2, head_dim=256, page_tokens=16)
SAMPLE = (
    ("h200", QWEN3, PREFILL), ("h200", QWEN36, DECODE), ("a100", QWEN36, PREFILL), ("rtx4090", QWEN36, DECODE),
    ("rtx4090", QWEN3, PREFILL), ("rtx5090", SMALL, PREFILL),
)  # fmt: skip


@pytest.mark.slow
def test_a_sample_compiles_within_each_cards_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wanted = [(name, launch) for name, shape, point in SAMPLE for launch in launches(point, shape, DEVICES[name])]
    report = compile_requests([compile_request(launch, Target.of(DEVICES[name])) for name, launch in wanted], workers=2)
    assert report.errors == ()
    for (name, launch), result in zip(wanted, report.results, strict=True):
        assert 0 < result.shared_memory_bytes <= DEVICES[name].shared_memory_bytes, (name, launch.kernel)
