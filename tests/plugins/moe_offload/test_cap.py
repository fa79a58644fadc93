"""A cap on device memory, from the plan to the sizing, for a large hybrid model. Oracle: the arithmetic of its config.

The machine is made up: a card of 141 GiB with a cap of 16, as a user of a small card has it.
"""

from __future__ import annotations

from typing import Any

import pytest

from freetoken.config.engine_options import CoreOptions
from freetoken.memory.allocator import LATER_BYTES, allocator_limit_bytes, is_capped
from freetoken.memory.broker import DEVICE, claims_on, needed_bytes, steady_bytes
from freetoken.memory.sizing import size_after_measure
from freetoken.models import qwen3_5_moe
from freetoken.testing.plans import planned
from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.hardware import Device
from freetoken.vocab.plan import Plan
from freetoken.vocab.units import GIB, MIB
from freetoken_moe_offload.options import OffloadOptions

H200 = Device("cuda", 0, "H200", (9, 0), 132, 232_448, 141 * GIB, 140 * GIB)
CAP = 16 * GIB
CONTEXT = 640 * MIB  # what the driver takes for the process beside tensors


def published(layers: int = 40) -> dict[str, Any]:
    """Qwen3.6-35B-A3B's dimensions."""
    text = {
        **qwen3_5_moe.FAMILY.tiny()["text_config"], "hidden_size": 2048, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "vocab_size": 248_320, "max_position_embeddings": 262_144,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
    }  # fmt: skip
    return {**qwen3_5_moe.FAMILY.tiny(), "text_config": text, "tie_word_embeddings": False}


def plan_of(**options: Any) -> Plan:
    given = {
        "moe_strategy": "offload", "device_memory_bytes": CAP, "max_seq_len": 131_072, "kv_tokens": 131_072,
        "max_running_requests": 4, **options,
    }  # fmt: skip
    return planned(published(), H200, options=CoreOptions(**given)).plan


def device_claims(plan: Plan) -> Any:
    return claims_on(plan.claims, DEVICE, plan.device)


def slots_of(plan: Plan) -> int:
    text = next(claim.what for claim in plan.claims if claim.owner == "offload" and claim.where == "device")
    return int(text.split("slots for ")[1].split()[0])


@pytest.fixture(scope="module")
def plan() -> Plan:
    """With no option that the issue's user would not give: chunks are the default's."""
    return plan_of()


def test_everything_is_within_the_cap(plan: Plan) -> None:
    """Oracle: the sum of all claims' worst moments; the context and later captures are among them."""
    assert is_capped(plan)
    assert 0.99 * CAP < needed_bytes(device_claims(plan)) <= CAP
    owners = {claim.owner: claim.worst_bytes for claim in device_claims(plan)}
    assert owners["runtime"] == CONTEXT + LATER_BYTES
    assert {"weights", "attention", "step", "offload", "state", "kv"} <= owners.keys()


def test_kv_for_128k_tokens_and_a_prompt_of_64k_fit(plan: Plan) -> None:
    """Oracle: ten of forty layers keep 2 heads of 256 in bfloat16 for K and for V: 20 KiB a token."""
    assert plan.kv_tokens >= 131_072
    assert plan.max_seq_tokens == 131_072
    kv = next(claim for claim in plan.claims if claim.owner == "kv")
    assert kv.steady_bytes == plan.kv_tokens * 20 * 1024


def test_a_layer_and_what_comes_ahead_of_the_next_fit_the_slots(plan: Plan) -> None:
    """Oracle: 256 experts a layer; with fewer slots a prompt's chunks would move experts twice."""
    assert slots_of(plan) >= 256 + 32


def test_a_window_is_longer_than_a_chunk(plan: Plan) -> None:
    """Oracle: the bytes that a window of 32,768 tokens takes beside a step: three rows of 2048 in bfloat16 a token."""
    offload = next(claim for claim in plan.claims if claim.owner == "offload" and claim.where == "device")
    assert offload.worst_bytes - offload.steady_bytes == 3 * 32_768 * 2048 * 2
    assert plan.max_prefill_tokens < 32_768


@pytest.mark.parametrize("context", [CONTEXT, CONTEXT // 2])
def test_after_the_weights_nothing_is_shrunk(plan: Plan, context: int) -> None:
    """Oracle: the plan. Free is what the card has without the context, the weights and the slots; the step was measured
    as declared. Then the allocator may hold the pools, the step and a window."""
    steady = {c.owner: c.steady_bytes for c in device_claims(plan)}
    loaded = steady["weights"] + steady["offload"]
    free = H200.memory_free_bytes - context - loaded
    peak = needed_bytes(device_claims(plan)) - steady_bytes(device_claims(plan))
    step = next(c.worst_bytes for c in device_claims(plan) if c.owner == "step")
    assert peak >= step
    sizing = size_after_measure(plan, free, step_peak_bytes=step, reserve_bytes=LATER_BYTES)
    assert sizing.kv_tokens == plan.kv_tokens
    assert sizing.max_prefill_tokens == plan.max_prefill_tokens
    assert sizing.because[0].startswith("as planned")
    window = next(c.worst_bytes - c.steady_bytes for c in device_claims(plan) if c.owner == "offload")
    taken = loaded + steady["kv"] + steady["state"] + steady["attention"] + step + window
    assert taken <= allocator_limit_bytes(plan, free, loaded)


def test_a_cap_that_is_too_low_says_what_would_help() -> None:
    """Oracle: the refusal's words."""
    with pytest.raises(RefusedPlan) as caught:
        plan_of(device_memory_bytes=6 * GIB)
    assert "--max-prefill-tokens" in str(caught.value)


def test_a_smaller_chunk_makes_room_for_slots() -> None:
    """Oracle: more slots at half the chunk, the same cap and the same KV."""
    assert slots_of(plan_of(max_prefill_tokens=4096)) > slots_of(plan_of(max_prefill_tokens=8192))


def test_slots_may_be_asked_for_under_the_cap() -> None:
    """Oracle: the number; and one that does not fit is refused with one that does."""
    options = CoreOptions(moe_strategy="offload", device_memory_bytes=CAP, max_seq_len=131_072, kv_tokens=131_072,
                          max_running_requests=4)  # fmt: skip
    asked = {OffloadOptions: OffloadOptions(slots=300)}
    assert slots_of(planned(published(), H200, options=options, plugin_options=asked).plan) == 300
    with pytest.raises(RefusedPlan) as caught:
        planned(published(), H200, options=options, plugin_options={OffloadOptions: OffloadOptions(slots=5000)})
    most = int(str(caught.value).split("--moe-offload-slots ")[-1].split()[0])
    asked = {OffloadOptions: OffloadOptions(slots=most)}
    assert slots_of(planned(published(), H200, options=options, plugin_options=asked).plan) == most
