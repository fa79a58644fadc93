"""The broker's decisions. Oracles: the arithmetic written out, and hypothesis for what must hold at any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetoken.memory.broker import (
    Fit,
    KVFit,
    Remedy,
    claims_on,
    fit,
    fit_machine,
    kv_tokens_that_fit,
    needed_bytes,
    steady_bytes,
)
from freetoken.vocab.errors import Refusal
from freetoken.vocab.hardware import Device
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.units import GIB, MIB

WEIGHTS = MemoryClaim("weights", "parameters", 10 * GIB, 11 * GIB)
STEP = MemoryClaim("step", "activations", 0, 2 * GIB)
PINNED = MemoryClaim("offload", "pinned experts", 30 * GIB, where="host")
GPU = Device(kind="cuda", memory_total_bytes=16 * GIB)

claims = st.builds(
    MemoryClaim, st.sampled_from(["a", "b"]), st.just("x"), st.integers(0, 10**6), st.integers(0, 2 * 10**6)
)


def test_needed_is_every_parts_worst_moment_at_once():
    assert needed_bytes([WEIGHTS, STEP]) == 13 * GIB
    assert steady_bytes([WEIGHTS, STEP]) == 10 * GIB


def test_a_fit_says_the_numbers():
    answer = fit([WEIGHTS, STEP], 16 * GIB)
    assert answer == Fit(13 * GIB, 16 * GIB, "13.0 GiB of 16.0 GiB device memory")
    assert answer.spare_bytes == 3 * GIB


def test_a_refusal_lists_claims_by_size_and_each_option_that_is_enough():
    remedies = [Remedy("--max-seq-len 4096", 6 * GIB), Remedy("--moe-strategy offload", 9 * GIB), Remedy("--x 1", 1)]
    answer = fit([STEP, WEIGHTS], 8 * GIB, remedies=remedies)
    assert isinstance(answer, Refusal)
    assert answer.asked == "a plan that takes 13.0 GiB of device memory"
    assert answer.found == (
        "8.0 GiB may be taken, 5.0 GiB too little: weights 10.0 GiB and 1.0 GiB at the peak (parameters); "
        "step 2.0 GiB (activations)"
    )
    assert answer.fix == "use --max-seq-len 4096 (frees 6.0 GiB), or --moe-strategy offload (frees 9.0 GiB)"


def test_options_are_combined_when_none_is_enough_alone():
    remedies = [Remedy("--a", 3 * GIB), Remedy("--b", 2 * GIB), Remedy("--c", 1 * GIB)]
    assert fit([WEIGHTS], 6 * GIB, remedies=remedies).fix == "use together --a (frees 3.0 GiB) and --b (frees 2.0 GiB)"
    assert "no option is enough: --a" in fit([WEIGHTS], 1 * GIB, remedies=remedies).fix
    assert fit([WEIGHTS], 1 * GIB).fix == "use a smaller model, or a machine with more memory"


def test_host_claims_count_against_the_host_and_on_a_cpu_all_against_one_memory():
    assert claims_on([WEIGHTS, PINNED], "host", GPU) == (PINNED,)
    both = fit_machine([WEIGHTS, PINNED], GPU, 16 * GIB, 32 * GIB)
    assert [f.because for f in both] == ["11.0 GiB of 16.0 GiB cuda:0 memory", "30.0 GiB of 32.0 GiB host memory"]
    host = fit_machine([WEIGHTS, PINNED], GPU, 16 * GIB, 8 * GIB, remedies=[Remedy("--device-only", 40 * GIB)])
    assert "host memory" in host.asked
    assert "--device-only" not in host.fix, "it frees device memory"
    on_cpu = fit_machine([WEIGHTS, PINNED], Device(), 32 * GIB, 32 * GIB)
    assert isinstance(on_cpu, Refusal)
    assert "41.0 GiB" in on_cpu.asked


@given(st.lists(claims), st.integers(0, 10**7))
def test_fit_is_exactly_needed_within_available(some, available):
    answer = fit(some, available)
    assert isinstance(answer, Fit) == (needed_bytes(some) <= available)
    assert needed_bytes(some) >= steady_bytes(some)


@given(
    some=st.lists(claims, max_size=3),
    available=st.integers(0, 10**7),
    token_bytes=st.integers(1, 5000),
    page=st.sampled_from([1, 16, 64]),
    wanted=st.integers(1, 5000),
    least=st.integers(1, 500),
)
def test_kv_tokens_are_whole_pages_and_as_many_as_fit(some, available, token_bytes, page, wanted, least):
    """Oracle: one page more would not fit or is not wanted; the scratch page is paid for."""
    wanted = max(wanted, least)
    left = available - needed_bytes(some)
    answer = kv_tokens_that_fit(
        some, available, kv_token_bytes=token_bytes, page_tokens=page, wanted_tokens=wanted, least_tokens=least
    )
    if isinstance(answer, Refusal):
        assert (-(-least // page) + 1) * page * token_bytes > left
        return
    assert answer.tokens % page == 0
    assert answer.tokens >= least
    assert (answer.tokens + page) * token_bytes <= left
    assert answer.tokens >= wanted or (answer.tokens + 2 * page) * token_bytes > left
    assert answer.tokens < wanted + page


def test_a_model_without_kv_gets_what_it_asks():
    answer = kv_tokens_that_fit([], 0, kv_token_bytes=0, page_tokens=16, wanted_tokens=100)
    assert answer == KVFit(112, "the model keeps no K and V")


def test_kv_refusal_carries_the_numbers_and_the_advice():
    answer = kv_tokens_that_fit(
        [WEIGHTS], 11 * GIB + 10 * MIB, kv_token_bytes=MIB, page_tokens=16, wanted_tokens=64, least_tokens=32,
        remedies=[Remedy("--max-seq-len 16", GIB)],
    )  # fmt: skip
    assert isinstance(answer, Refusal)
    assert "48.0 MiB; 10.0 MiB of 11.0 GiB are left beside weights 10.0 GiB" in answer.found
    assert answer.fix == "use --max-seq-len 16 (frees 1.0 GiB)"
