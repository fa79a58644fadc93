"""The launch space of attention. Oracle: the backend's own forward on CPU tensors, its launches recorded."""

import pytest
import torch

pytest.importorskip("triton")

from freetoken.ops.triton_stub import Target, record_launches
from freetoken.plugin.protocols import AttentionLimits, AttentionSetup
from freetoken.testing.fakes import make_batch
from freetoken.testing.launches import DEVICES, LaunchSpaceConformance, small_space
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, StepSpace
from freetoken.vocab.model_spec import AttentionGroup
from freetoken.vocab.ops import OpShape
from freetoken.warmup.enumerate import enumerate_keys
from freetoken.warmup.keys import kernel_of
from freetoken.warmup.launch_space import attention_shape, build_launch_space
from freetoken.warmup.lint import lint
from freetoken_attention_triton import backend as backend_module
from freetoken_attention_triton.launches import launches
from freetoken_attention_triton.spec import SPEC

H200 = DEVICES["h200"]
QWEN3 = AttentionGroup("full", (0,), 32, PagedKV(4, 128, 128, "bfloat16"), 128**-0.5)
QWEN36 = AttentionGroup("full", (0,), 16, PagedKV(2, 256, 256, "bfloat16"), 256**-0.5)
SLIDING = AttentionGroup("sliding", (0,), 4, PagedKV(4, 64, 64, "float16", window=100), 64**-0.5)


def make_backend(group: AttentionGroup, device: Device, monkeypatch=None):
    """The backend as for ``device``, on CPU tensors."""
    limits = AttentionLimits(16, 1024, 32, 512)
    made = SPEC.create(AttentionSetup(group, device, group.cache.dtype, limits))
    made._device = torch.device("cpu")
    return made


def lens_of(point: StepPoint) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and prefix lengths of a batch that is at ``point``."""
    if point.decode:
        return (1,) * point.sequences, (point.max_context - 1,) + (1,) * (point.sequences - 1)
    query = [point.max_query]
    left = point.tokens - point.max_query
    for others in range(point.sequences - 1, 0, -1):
        query.append(min(point.max_query, left - others + 1))
        left -= query[-1]
    prefix = [point.max_context - point.max_query] + [0] * (point.sequences - 1)
    return tuple(query), tuple(prefix)


def forward(group: AttentionGroup, point: StepPoint, device: Device) -> None:
    """The engine's call site: plan, then one layer's forward."""
    backend = make_backend(group, device)
    batch = make_batch(*lens_of(point))
    cache = group.cache
    dtype = getattr(torch, cache.dtype)
    pool = torch.empty(8, 16, cache.heads, cache.k_dim, dtype=dtype)
    q = torch.empty(point.tokens, group.q_heads, cache.k_dim, dtype=dtype)
    backend.forward(q, pool, pool, 0, backend.plan(batch))


class TestLaunchSpace(LaunchSpaceConformance):
    def shapes(self):
        return [attention_shape(group, group.cache.dtype, 16) for group in (QWEN3, QWEN36, SLIDING)]

    def launches(self):
        return launches

    def space(self) -> StepSpace:
        return small_space(max_tokens=200, max_sequences=20, max_context=1000)

    def points(self):
        return [
            StepPoint(7, 2, 6, 900, 2, False),
            StepPoint(200, 20, 100, 1000, 20, False),
            StepPoint(1, 1, 1, 1, 1, False),
            StepPoint(20, 20, 1, 500, 20, True),
        ]

    def call(self, point: StepPoint, shape: OpShape, device: Device) -> None:
        groups = {attention_shape(group, group.cache.dtype, 16): group for group in (QWEN3, QWEN36, SLIDING)}
        forward(groups[shape], point, device)


def whole_space() -> StepSpace:
    from freetoken.vocab.launch import Range

    return StepSpace(
        tokens=Range(1, 8192), sequences=Range(1, 256), chunk=Range(1, 8192), prefix=Range(0, 40_959),
        context=Range(1, 40_960), decode_sequences=Range(1, 256),
    )  # fmt: skip


@pytest.mark.parametrize("group", [QWEN3, QWEN36], ids=("qwen3", "qwen3.6"))
def test_six_kernels_serve_every_step_of_8192_tokens(group: AttentionGroup) -> None:
    """By hand: prefill and decode, whole and split, and the two ways parts are joined."""
    shape = attention_shape(group, "bfloat16", 16)
    space = build_launch_space(whole_space(), [("layer", ((shape, launches),))], H200)
    found = enumerate_keys(space)
    assert sorted(kernel_of(key).partition(":")[2] for key in found.keys) == [
        "combine", "combine_decoded", "decode", "decode", "prefill", "prefill",
    ]  # fmt: skip
    assert lint(space) == ()


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_card_passes_the_lint(name: str) -> None:
    shape = attention_shape(QWEN3, "bfloat16", 16)
    assert lint(build_launch_space(small_space(), [("layer", ((shape, launches),))], DEVICES[name])) == ()


def test_a_patched_call_site_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: a call site that launches another split than declared no longer agrees with the launch space."""
    from freetoken_attention_triton.launches import Splits

    original = backend_module.splits

    def never_split(*args):
        parts = original(*args)
        return Splits(min(parts.prefill, 1), min(parts.decode, 1))

    monkeypatch.setattr(backend_module, "splits", never_split)
    with pytest.raises(AssertionError, match="declared"):
        TestLaunchSpace().test_recorded_keys_are_declared_and_declared_keys_are_recorded()


def test_captured_plans_launch_what_decode_steps_declare() -> None:
    """Oracle: the declared keys and grids of a decode step of the captured size, at the largest context."""
    backend = make_backend(QWEN3, H200)
    pool = torch.empty(8, 16, 4, 128, dtype=torch.bfloat16)
    shape = attention_shape(QWEN3, "bfloat16", 16)
    space = build_launch_space(small_space(), [("layer", ((shape, launches),))], H200)
    backend.reserve_graph(AttentionLimits(16, 1024, 32, 512))
    for size in (1, 3, 20):
        plan = backend.plan_capture(make_batch((1,) * size, (1,) * size))
        with record_launches(Target.of(H200)) as records:
            q = torch.empty(size, 32, 128, dtype=torch.bfloat16)
            backend.forward(q, pool, pool, 0, plan)
        point = StepPoint(size, size, 1, 1000, size, True)
        assert {record.key for record in records} == space.keys("layer", point)
        assert [record.grid for record in records] == [x.grid for x in space.launches("layer", point)]
