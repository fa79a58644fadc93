"""How many slots, and what they take: arithmetic, refusals and whole plans."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from freetoken.config.engine_options import CoreOptions
from freetoken.models import qwen3_moe
from freetoken.plugin.protocols import BankPart, ExpertLayer
from freetoken.testing.plans import launch_space_of, planned
from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.hardware import Device
from freetoken.vocab.units import GIB, MIB
from freetoken_moe_offload.budget import PAGE_BYTES, Group, budget, decide, spread
from freetoken_moe_offload.options import OffloadOptions

GPU = Device("cuda", 0, "H200", (9, 0), 132, 232_448, 16 * GIB, 16 * GIB)
QWEN3_30B = {
    **qwen3_moe.FAMILY.tiny(), "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ arithmetic


@given(st.integers(1, 4), st.integers(2, 9), st.integers(4 * 9 * 500, 1 << 20), st.sampled_from(["cpu", "cuda"]))
def test_the_declared_memory_decides_the_same_slots_again(
    setup_of: Any, layers: int, experts: int, memory: int, kind: str
) -> None:
    """Oracle: idempotence. The engine is built with what the plan declared; and more memory never means fewer slots."""
    asked = evolve(setup_of(layers, experts, 2, memory), device=Device(kind))
    try:
        sizes = decide(asked)
    except RefusedPlan:
        return
    declared = sum(claim.worst_bytes for claim in budget(asked) if claim.where == "device")
    assert declared <= memory
    assert decide(evolve(asked, memory_bytes=declared)) == sizes
    assert decide(evolve(asked, memory_bytes=memory + 4096)).slots >= sizes.slots


def test_more_than_all_experts_are_never_kept(setup_of: Any) -> None:
    """Oracle: layers × experts."""
    assert decide(setup_of(3, 5, 2)).slots == (15,)
    assert decide(setup_of(3, 5, 2, slots=999)).slots == (15,)


@pytest.mark.parametrize(
    ("options", "slots"), [({"slots": 7}, 7), ({"fraction": 0.5}, 8), ({"fraction": 0.0}, 2), ({"fraction": 1.0}, 16)]
)
def test_what_is_asked_for_is_given(setup_of: Any, options: dict[str, float], slots: int) -> None:
    """Oracle: the number, or the share of 16 experts, at least what one token needs."""
    assert decide(setup_of(2, 8, 2, **options)).slots == (slots,)


def test_memory_bytes_bounds_everything_on_the_device(setup_of: Any) -> None:
    """Oracle: the claims' sum."""
    for size in (18_000, 25_000, 30_000):
        claims = budget(setup_of(4, 16, 2, memory_bytes=size, window_tokens=64))
        device = sum(claim.worst_bytes for claim in claims if claim.where == "device")
        assert 0.6 * size < device <= size


def test_host_memory_is_the_experts_and_little_more() -> None:
    """Oracle: the bytes of all experts; at real sizes the padding to pages is far below 5 %."""
    layout = (BankPart("gate_up", "bfloat16", (1536, 2048)), BankPart("down", "bfloat16", (2048, 768)))
    group = Group(layout, tuple(range(48)), 128)
    exact = 48 * 128 * 3 * 768 * 2048 * 2
    assert exact <= group.host_bytes <= exact + 48 * 2 * PAGE_BYTES


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 200))
def test_slots_are_spread_over_unlike_layers(layers: list[int], total: int) -> None:
    """Oracle: the bounds of each group and the sum."""
    groups = tuple(Group((BankPart("w", "float32", (n + 1,)),), tuple(range(k)), 8) for n, k in enumerate(layers))
    least, every = 2 * len(groups), sum(group.all_experts for group in groups)
    slots = spread(groups, total, 2)
    assert all(2 <= count <= group.all_experts for count, group in zip(slots, groups, strict=True))
    if least <= total <= every:
        assert sum(slots) <= total


def test_layers_of_unlike_layout_get_banks_of_their_own(setup_of: Any) -> None:
    """Oracle: the layouts."""
    like = setup_of(3, 4, 2)
    other = ExpertLayer(1, (BankPart("codes", "uint8", (5,)),))
    groups = decide(evolve(like, layers=(like.layers[0], other, like.layers[2]))).groups
    assert [group.layers for group in groups] == [(0, 2), (1,)]


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "memory", "told"),
    [
        ({"slots": 1}, 1 << 30, "at least 2 slots"),
        ({"slots": 12}, 12_000, "--moe-offload-slots"),
        ({"memory_bytes": 1 << 29}, 1 << 20, "--moe-offload-memory-bytes"),
        ({}, 100, "the fewest slots, 2"),
        ({"slots": 3, "fraction": 0.1}, 1 << 30, "--moe-offload-slots and --moe-offload-fraction"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(
    setup_of: Any, options: dict[str, float], memory: int, told: str
) -> None:
    """Oracle: the message; it names what was asked, what there is, and a flag that helps."""
    with pytest.raises(RefusedPlan, match=told) as caught:
        decide(setup_of(2, 8, 2, memory, **options))
    assert caught.value.refusal.fix


def test_the_number_in_a_refusal_would_fit(setup_of: Any) -> None:
    """Oracle: the refusal's own advice, followed."""
    with pytest.raises(RefusedPlan) as caught:
        decide(setup_of(4, 8, 2, 18_000, window_tokens=64, slots=32))
    most = int(caught.value.refusal.fix.split("--moe-offload-slots ")[1].split()[0])
    assert decide(setup_of(4, 8, 2, 18_000, window_tokens=64, slots=most)).slots == (most,)
    with pytest.raises(RefusedPlan):
        decide(setup_of(4, 8, 2, 18_000, window_tokens=64, slots=most + 1))


def test_too_little_host_memory_is_refused(setup_of: Any) -> None:
    """Oracle: the bytes in the message."""
    with pytest.raises(RefusedPlan, match=r"16.0 KiB of host memory"):
        decide(evolve(setup_of(2, 2, 1), host_memory_bytes=1000))


# ------------------------------------------------------------------------------------------------ whole plans


def test_auto_takes_offload_where_the_experts_do_not_fit() -> None:
    """Oracle: 58 GB of experts, once on a card of 16 GiB and once on one of 141; the plan of neither exceeds it."""
    options = CoreOptions(max_seq_len=8192, max_running_requests=4, max_prefill_tokens=4096)
    small = planned(QWEN3_30B, GPU, options=options).plan
    large = planned(QWEN3_30B, evolve(GPU, memory_free_bytes=141 * GIB), options=options).plan
    assert (small.moe.name, large.moe.name) == ("offload", "resident")
    for plan in (small, large):
        device = sum(claim.worst_bytes for claim in plan.claims if claim.where == "device")
        assert 0.45 * plan.memory_bytes < device <= plan.memory_bytes


def test_asked_kv_comes_before_slots() -> None:
    """Oracle: the plan's KV tokens, which the slots leave room for."""
    plan = planned(QWEN3_30B, GPU, options=CoreOptions(max_seq_len=8192, kv_tokens=32768, max_prefill_tokens=2048)).plan
    assert plan.moe.name == "offload"
    assert plan.kv_tokens >= 32768


def test_an_impossible_plan_says_what_would_help() -> None:
    """Oracle: the message's flags."""
    with pytest.raises(RefusedPlan) as caught:
        planned(
            QWEN3_30B,
            GPU,
            options=CoreOptions(moe_strategy="offload", kv_tokens=10_000_000, max_seq_len=8192, max_prefill_tokens=512),
        )
    assert "--kv-tokens" in str(caught.value)


def test_the_launches_are_in_the_launch_space() -> None:
    """Oracle: the kernels' names among the keys of a layer; nothing of them on a CPU."""
    options = CoreOptions(max_seq_len=4096, max_running_requests=4, max_prefill_tokens=512)
    space = launch_space_of(planned(QWEN3_30B, GPU, options=options))
    layer = next(kind for kind in space.kinds if kind.startswith("layers."))
    from freetoken.vocab.launch import StepPoint

    decode = " ".join(space.keys(layer, StepPoint(1, 1, 1, 9, 1, True)))
    prefill = " ".join(space.keys(layer, StepPoint(512, 1, 512, 512, 1, False)))
    for name in ("select_kernel", "place_kernel", "settle_kernel"):
        assert name in decode
        assert name in prefill
    assert "fetch_kernel" in decode
    assert "fetch_kernel" not in prefill


def test_options_are_a_plain_class() -> None:
    """Oracle: the defaults that the README names."""
    assert OffloadOptions() == OffloadOptions(
        slots=None, fraction=None, memory_bytes=None, policy="lfu-decay", window_tokens=32768, foresee=True
    )
    assert MIB < GIB
