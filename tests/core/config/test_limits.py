"""Token limits and the KV cache's size. Oracles: the inequalities they must keep, over random machines (hypothesis)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.config.engine_options import CoreOptions
from freetoken.config.limits import CPU_KV_TOKENS, Limits, decide_kv_tokens, decide_limits, round_up
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import ModelSpec

CPU, GPU = Device(), Device(kind="cuda", name="a card")
PAGE = 16


def spec(context: int = 4096, heads: int = 2, dim: int = 64) -> ModelSpec:
    """One layer: ``heads × dim`` float32 keys and values."""
    cache = PagedKV(heads, dim, dim, "float32")
    return ModelSpec("llama", "LlamaForCausalLM", 1, 128, 256, context, (cache,), (), 1000)


def limits(options: CoreOptions, model: ModelSpec, device: Device = CPU) -> Limits:
    return decide_limits(options, model, device)


def reasons(found: Limits) -> dict[str, tuple[object, str]]:
    return {d.name: (d.value, d.because) for d in found.decisions}


def test_nothing_asked_is_the_models_context_and_the_devices_chunk() -> None:
    on_cpu, on_gpu = limits(CoreOptions(), spec(40_000)), limits(CoreOptions(), spec(40_000), GPU)
    assert (on_cpu.max_seq_tokens, on_cpu.max_prefill_tokens) == (40_000, 512)
    assert (on_gpu.max_seq_tokens, on_gpu.max_prefill_tokens) == (40_000, 8192)
    assert reasons(on_cpu)["max_seq_tokens"] == (40_000, "the model's context")
    assert reasons(on_gpu)["max_prefill_tokens"] == (8192, "default on a cuda")


def test_what_is_asked_for_is_taken_and_said() -> None:
    found = limits(CoreOptions(max_seq_len=100, max_prefill_tokens=7, max_running_requests=3), spec())
    assert (found.max_seq_tokens, found.max_prefill_tokens, found.max_running_requests) == (100, 7, 3)
    assert reasons(found)["max_seq_tokens"] == (100, "asked for")
    assert reasons(found)["max_prefill_tokens"] == (7, "asked for")


def test_a_chunk_is_no_longer_than_the_longest_request() -> None:
    found = limits(CoreOptions(max_seq_len=100), spec())
    assert reasons(found)["max_prefill_tokens"] == (100, "no longer than the longest request")


def test_more_context_than_the_model_has_is_refused_with_both_numbers() -> None:
    with pytest.raises(RefusedPlan) as refused:
        limits(CoreOptions(max_seq_len=5000), spec(4096))
    assert refused.value.refusal.asked == "--max-seq-len 5000"
    assert "4096" in refused.value.refusal.found
    assert "4096" in refused.value.refusal.fix


@given(
    free=st.integers(0, 1 << 32),
    seq=st.integers(2, 4096),
    running=st.integers(1, 64),
    asked=st.none() | st.integers(1, 100_000),
    gpu=st.booleans(),
)
def test_kv_is_whole_pages_that_fit_and_hold_one_whole_request(
    free: int, seq: int, running: int, asked: int | None, gpu: bool
) -> None:
    model, device = spec(), GPU if gpu else CPU
    options = CoreOptions(max_seq_len=seq, max_running_requests=running, kv_tokens=asked)
    found = limits(options, model, device)
    least = round_up(asked or seq, PAGE) + PAGE  # the scratch page comes on top
    if least * model.kv_token_bytes > free:
        with pytest.raises(RefusedPlan, match=r"are left(.|\n)*--max-seq-len"):
            decide_kv_tokens(options, model, found, PAGE, device, free)
        return
    kv = decide_kv_tokens(options, model, found, PAGE, device, free)
    assert kv.value % PAGE == 0
    assert kv.value * model.kv_token_bytes <= free
    assert kv.value >= least
    if asked is not None:
        assert kv.value == least


def test_no_more_than_the_running_requests_can_use() -> None:
    options = CoreOptions(max_seq_len=160, max_running_requests=3)
    kv = decide_kv_tokens(options, spec(), limits(options, spec(), GPU), PAGE, GPU, 1 << 40)
    assert (kv.value, kv.because) == (3 * 176, "all that the running requests could use")


def test_a_cpu_does_not_take_all_memory_for_contexts_nobody_has() -> None:
    options = CoreOptions(max_running_requests=4096)
    kv = decide_kv_tokens(options, spec(), limits(options, spec()), PAGE, CPU, 1 << 50)
    assert kv.value == CPU_KV_TOKENS


def test_what_memory_leaves_is_said() -> None:
    options = CoreOptions(max_seq_len=160)
    free = 400 * spec().kv_token_bytes
    kv = decide_kv_tokens(options, spec(), limits(options, spec(), GPU), PAGE, GPU, free)
    assert (kv.value, kv.because) == (400, "what the memory left allows")


@given(value=st.integers(0, 1 << 40), multiple=st.integers(1, 4096))
def test_round_up_is_the_smallest_multiple(value: int, multiple: int) -> None:
    found = round_up(value, multiple)
    assert found % multiple == 0
    assert value <= found < value + multiple
