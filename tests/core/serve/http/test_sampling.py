"""A request's fields as ``SamplingParams``: who wins, and what is passed on unchanged."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.serve.http.errors import ApiError
from freetoken.serve.http.request_models import GenerationBody
from freetoken.serve.http.sampling import deadline_of, max_new_tokens, sampling_params
from freetoken.serve.messages import Ready
from freetoken.serve.text import GenerationDefaults
from freetoken.vocab.sampling import SamplingParams

READY = Ready("m", max_seq_tokens=100, max_running_requests=4, kv_tokens=80, vocab_size=50, seconds=1.0)
WISHES = GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20)


def params(defaults: GenerationDefaults = GenerationDefaults(), **fields: object) -> SamplingParams:
    return sampling_params(GenerationBody(**fields), defaults, READY, 10, None)  # type: ignore[arg-type]


def test_the_checkpoints_wishes_fill_gaps_only() -> None:
    """Oracle: the order request, checkpoint, API default, spelt out."""
    found = params(WISHES, top_p=0.5)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.5, 20, 0.0)


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_can_be_turned_off_against_the_checkpoint(off: int) -> None:
    """Oracle: both customary spellings of off."""
    assert params(WISHES, top_k=off).top_k == 0


def test_an_explicit_zero_or_false_is_not_a_gap() -> None:
    """Oracle: temperature 0 is greedy whatever the checkpoint wishes."""
    assert params(WISHES, temperature=0).greedy


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0.01, 1),
            "min_p": st.floats(0, 1),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "presence_penalty": st.floats(-2, 2),
            "ignore_eos": st.booleans(),
            "min_tokens": st.integers(0, 10),
        },
    )
)
def test_what_is_given_is_passed_on(fields: dict[str, object]) -> None:
    """Oracle: SamplingParams built from the same fields directly."""
    assert params(**fields) == SamplingParams(max_tokens=10, **fields)  # type: ignore[arg-type]


def test_lists_become_tuples_in_order() -> None:
    """Oracle: the lists sent."""
    found = params(stop=["b", "a"], stop_token_ids=[3, 1], logit_bias={"4": 1.5, "2": -100})
    assert (found.stop, found.stop_token_ids, found.logit_bias) == (("b", "a"), (3, 1), ((4, 1.5), (2, -100.0)))


@given(st.integers(1, 79), st.none() | st.integers(1, 200), st.none() | st.integers(1, 100))
def test_never_more_tokens_than_the_context_or_the_cache_hold(
    prompt: int, asked: int | None, fallback: int | None
) -> None:
    """Property: prompt and answer fit in the smaller of context (100) and KV tokens (80); what does not is 400."""
    if asked is not None and prompt + asked > 80:
        with pytest.raises(ApiError, match=f"ask for at most {80 - prompt}"):
            max_new_tokens(asked, prompt, READY, fallback)
        return
    found = max_new_tokens(asked, prompt, READY, fallback)
    assert 1 <= found <= 80 - prompt
    assert asked is None or found == asked


def test_the_earliest_of_deadline_timeout_and_the_servers_limit_counts() -> None:
    """Oracle: the two clocks, read around the call."""
    body = GenerationBody(timeout_s=50.0, deadline=time.time() + 20)
    found = deadline_of(body)
    assert found is not None
    assert found - time.monotonic() == pytest.approx(20, abs=1)
    assert deadline_of(GenerationBody()) is None
    for server_s, expected in ((5.0, 5), (30.0, 20)):
        found = deadline_of(body, server_s)
        assert found is not None
        assert found - time.monotonic() == pytest.approx(expected, abs=1)
