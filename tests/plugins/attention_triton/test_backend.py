"""What the backend refuses, and what its package must not import."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from freetoken.plugin.protocols import AttentionLimits, AttentionSetup
from freetoken.testing.fakes import make_batch
from freetoken.testing.launches import DEVICES
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device, Hardware
from freetoken.vocab.model_spec import AttentionGroup
from freetoken_attention_triton.probe import probe
from freetoken_attention_triton.spec import SPEC

LIMITS = AttentionLimits(16, 128, 8, 64)


def make_backend():
    group = AttentionGroup("g", (0,), 4, PagedKV(2, 64, 64, "float16"), 0.125)
    made = SPEC.create(AttentionSetup(group, DEVICES["h200"], "float16", LIMITS))
    made._device = torch.device("cpu")
    return made


def test_what_the_kernels_cannot_address_is_refused() -> None:
    backend = make_backend()
    plan = backend.plan(make_batch((3,), (0,)))
    q = torch.zeros(3, 4, 64, dtype=torch.float16)
    pool = torch.zeros(8, 16, 2, 64, dtype=torch.float16)
    with pytest.raises(EngineError, match="heads side by side"):
        backend.forward(q.transpose(0, 1).contiguous().transpose(0, 1), pool, pool, 0, plan)
    with pytest.raises(EngineError, match="pool whole"):
        backend.forward(q, pool.transpose(1, 2), pool, 0, plan)


def test_captures_need_memory_and_their_own_size() -> None:
    backend = make_backend()
    batch = make_batch((1, 1), (5, 9))
    with pytest.raises(EngineError, match="reserve_graph first"):
        backend.plan_capture(batch)
    backend.reserve_graph(LIMITS)
    plan = backend.plan_capture(batch)
    with pytest.raises(EngineError, match="captured for 2"):
        backend.plan_replay(plan, make_batch((1,), (5,)))
    with pytest.raises(EngineError, match="more than one token"):
        backend.plan_capture(make_batch((2, 1), (5, 9)))
    backend.release_graph()
    with pytest.raises(EngineError, match="reserve_graph first"):
        backend.plan_capture(batch)


def test_a_plan_owns_its_tensors() -> None:
    backend = make_backend()
    batch = make_batch((3, 1), (4, 40))
    plan = backend.plan(batch)
    before = [t.clone() for t in (plan.page_table, plan.query_starts, plan.context_lens)]
    for tensor in (batch.page_table, batch.query_starts, batch.context_lens):
        tensor.fill_(99)
    for old, new in zip(before, (plan.page_table, plan.query_starts, plan.context_lens), strict=True):
        assert torch.equal(old[: new.shape[0]], new)


def test_the_claim_covers_what_is_reserved() -> None:
    """Oracle: the bytes of the tensors themselves."""
    backend = make_backend()
    backend.reserve_graph(LIMITS)
    memory = backend._graph
    tensors = (memory.page_table, memory.query_starts, memory.context_lens, memory.partial, memory.lse)
    taken = sum(t.numel() * t.element_size() for t in tensors)
    group = AttentionGroup("g", (0,), 4, PagedKV(2, 64, 64, "float16"), 0.125)
    claim, _ = SPEC.workspace(AttentionSetup(group, DEVICES["h200"], "float16", LIMITS))
    assert taken <= claim.steady_bytes <= taken + 4096


@pytest.mark.parametrize(
    ("hardware", "reason"),
    [
        (Hardware(), "no CUDA device"),
        (Hardware(accelerators=(Device("cuda", name="T4", compute_capability=(7, 5)),)), "capability 7.5"),
        (Hardware(accelerators=(DEVICES["rtx3090"],)), ""),
    ],
)
def test_the_probe_says_what_is_missing(hardware: Hardware, reason: str) -> None:
    found = probe(hardware)
    assert found.ok is (not reason)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("freetoken_attention_triton.spec", ("torch", "triton")),
        ("freetoken_attention_triton.kernels", ("torch", "freetoken")),
    ],
)
def test_imports(module: str, banned: tuple[str, ...]) -> None:
    """Oracle: the module table of a fresh interpreter."""
    code = f"import sys, {module}; print(*[n for n in {banned!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
