"""The sampler: both routes against transformers' processors, draws apart from their batch, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.ops.sampling import sample
from freetoken.run.sampler import RowTensors, Sampler
from freetoken.run.step_plan import SamplingRow
from freetoken.vocab.errors import EngineError, UsageError
from freetoken.vocab.sampling import SamplingParams

VOCAB = 40
DRAWS = 20_000
CHI_SQUARE_LIMIT = 5.0  # standard deviations above the mean; the seeds are fixed, so a pass stays a pass


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return 2.5 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def row(params: SamplingParams, name: str = "a", seed: int = 1, step: int = 0, **more: Any) -> SamplingRow:
    return SamplingRow(name, params, seed, step, **more)


def sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(vocab, "cpu", sample)


def expected_distribution(logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """Transformers' processors in the order that the sampler documents; presence and frequency by OpenAI's formula."""
    from transformers.generation import logits_process as hf

    history = torch.tensor([prompt + output], dtype=torch.int64)
    scores = logits.clone()
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, scores)
    for token in set(output):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if params.logit_bias:
        scores = hf.SequenceBiasLogitsProcessor({(t,): b for t, b in params.logit_bias})(history, scores)
    warpers = [hf.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    for warper in warpers:
        scores = warper(history, scores)
    return torch.softmax(scores[0], dim=-1)


def assert_drawn_from(counts: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square; cells expecting fewer than five draws are pooled."""
    expected = probabilities.double() * counts.sum()
    assert not counts[probabilities == 0].any(), "a token that was cut was drawn"
    small = expected < 5
    cells = torch.cat((expected[~small], expected[small].sum().reshape(1)))
    drawn = torch.cat((counts[~small].double(), counts[small].sum().double().reshape(1)))
    kept = cells > 0
    statistic = float(((drawn[kept] - cells[kept]) ** 2 / cells[kept]).sum())
    freedom = max(1, int(kept.sum()) - 1)
    assert statistic < freedom + CHI_SQUARE_LIMIT * (2 * freedom) ** 0.5, f"{statistic:.1f} on {freedom} degrees"


PARAMS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.1),
    "all-cuts": SamplingParams(temperature=1.4, top_k=12, top_p=0.85, min_p=0.03),
    "repetition": SamplingParams(repetition_penalty=1.4),
    "presence-frequency": SamplingParams(presence_penalty=0.7, frequency_penalty=0.3),
    "bias": SamplingParams(logit_bias=((3, 4.0), (7, -100.0))),
    "everything": SamplingParams(
        temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.5,
        frequency_penalty=-0.2, logit_bias=((1, 1.5),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMS)
def test_draws_follow_transformers(name: str) -> None:
    """Oracle: chi-square of 20,000 draws against transformers' processors and warpers."""
    params = PARAMS[name]
    logits = logits_of(3)
    prompt, output = [3, 9, 9, 30], [5, 5, 8, 31]
    chosen = sampler()
    rows = [row(params, f"r{n}", seed=n % 7, step=n // 7) for n in range(DRAWS)]
    for r in rows:
        chosen.add(r.request_id, params, prompt, output)
    tokens = chosen.sample(logits.expand(DRAWS, -1), rows).tokens
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert_drawn_from(counts, expected_distribution(logits, params, prompt, output))


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.9]), top_k=st.sampled_from([0, 1, 3, 17, VOCAB, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]), min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1), step=st.integers(0, 2**20), others=st.integers(0, 6),
)  # fmt: skip
def test_a_draw_does_not_depend_on_its_batch(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, step: int, others: int
) -> None:
    """Property: the same row alone, and anywhere in a batch of other rows of both routes, draws the same token."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    mine = row(params, "mine", seed, step)
    logits = logits_of(seed % 1000)
    alone = int(sampler().sample(logits, [mine]).tokens[0])
    rows = [row(SamplingParams(logprobs=n % 3, top_k=n, top_p=0.7), f"o{n}", n, n) for n in range(others)]
    place = step % (others + 1)
    batch = [*rows[:place], mine, *rows[place:]]
    stacked = torch.cat([logits_of(n + 5) for n in range(others)] + [logits])
    stacked[[place, others]] = stacked[[others, place]]
    assert int(sampler().sample(stacked, batch).tokens[place]) == alone


def test_both_routes_draw_the_same() -> None:
    """Oracle: the fast route. Asking for log-probabilities changes no token."""
    logits = logits_of(8, rows=64)
    fast = [row(SamplingParams(top_p=0.9), f"f{n}", seed=n, step=n * 3) for n in range(64)]
    full = [evolve(r, params=SamplingParams(top_p=0.9, logprobs=2)) for r in fast]
    assert torch.equal(sampler().sample(logits, fast).tokens, sampler().sample(logits, full).tokens)


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Oracle: the definition. Both routes."""
    logits = torch.zeros(2, VOCAB)
    logits[:, [11, 29]] = 4.0
    rows = [row(SamplingParams(temperature=0)), row(SamplingParams(temperature=0, logprobs=0), "b")]
    assert sampler().sample(logits, rows).tokens.tolist() == [11, 11]


def test_logprobs_are_the_models() -> None:
    """Oracle: log_softmax of the logits given, whatever temperature, bias and penalties do; to 1e-3."""
    params = SamplingParams(
        temperature=0.2, top_k=3, repetition_penalty=1.5, presence_penalty=1, logit_bias=((2, 9.0),), logprobs=4
    )
    logits = logits_of(11, rows=3)
    chosen = sampler()
    for name in "ac":
        chosen.add(name, params, prompt=[1, 2, 3])
    result = chosen.sample(logits, [row(params, "a"), row(SamplingParams(), "b"), row(params, "c", seed=5)])
    found = result.read_logprobs()
    assert found[1] is None
    for n in (0, 2):
        reference = torch.log_softmax(logits[n].double(), dim=-1)
        entry = found[n]
        assert entry is not None
        assert entry.token == int(result.tokens[n])
        assert entry.logprob == pytest.approx(float(reference[entry.token]), abs=1e-3)
        order = reference.argsort(descending=True)[:4].tolist()
        assert [token for token, _ in entry.top] == order
        assert [value for _, value in entry.top] == pytest.approx(reference[order].tolist(), abs=1e-3)


def test_logprobs_come_as_many_as_each_row_asked() -> None:
    """Oracle: the rows' own numbers."""
    counts = (0, 5, 1)
    rows = [row(SamplingParams(logprobs=n), f"r{n}") for n in counts]
    found = sampler().sample(logits_of(1, rows=3), rows).read_logprobs()
    assert [len(entry.top) for entry in found if entry is not None] == list(counts)


def test_fast_rows_read_no_logprobs() -> None:
    """Oracle: nothing was asked for."""
    assert sampler().sample(logits_of(1, 2), [row(SamplingParams()), row(SamplingParams(), "b")]).read_logprobs() == (
        None, None,
    )  # fmt: skip


def test_penalties_follow_the_output_step_by_step() -> None:
    """Oracle: greedy decoding with transformers' repetition penalty and counts kept by hand."""
    params = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25)
    chosen = sampler()
    prompt, output = [4, 17], []
    chosen.add("a", params, prompt)
    chosen.add("other", params, [1])
    for step in range(25):
        logits = logits_of(2)
        batch = torch.cat((logits_of(step), logits))
        token = int(chosen.sample(batch, [row(params, "other", step=step), row(params, "a", step=step)]).tokens[1])
        scores = expected_scores(logits, params, prompt, output)
        assert token == int(scores.argmax())
        output.append(token)
    assert len(set(output)) > 1, "the penalties never changed the choice"


def expected_scores(logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    history = torch.tensor([prompt + output], dtype=torch.int64)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, logits.clone())
    for token in set(output):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return scores


def test_a_request_that_comes_back_knows_its_output() -> None:
    """Oracle: the same request that never went away."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    stayed, back = sampler(), sampler()
    stayed.add("a", params, [1])
    output = [int(stayed.sample(logits_of(6), [row(params, step=n)]).tokens) for n in range(6)]
    back.add("a", params, [1], output)
    again = row(params, step=6)
    assert torch.equal(stayed.sample(logits_of(6), [again]).tokens, back.sample(logits_of(6), [again]).tokens)


def test_slots_are_reused_clean() -> None:
    """Oracle: a sampler that never held another request."""
    params = SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=3.0)
    used, fresh = sampler(), sampler()
    for n in range(9):
        used.add(f"r{n}", params, list(range(VOCAB)), [n] * 4)
    for n in range(9):
        used.forget(f"r{n}")
    used.forget("never known")
    for one in (used, fresh):
        one.add("a", params, [2])
    assert torch.equal(
        used.sample(logits_of(4), [row(params)]).tokens, fresh.sample(logits_of(4), [row(params)]).tokens
    )


def test_min_tokens_keeps_a_request_from_stopping() -> None:
    """Oracle: the definition: a stop id is never drawn before step ``min_tokens`` and is likeliest from then on."""
    params = SamplingParams(temperature=0, min_tokens=3)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 9], logits[0, 12] = 10.0, 9.0, 8.0
    drawn = [
        int(sampler().sample(logits, [row(params, step=n, stop_ids=frozenset({7, 9, 10**6}))]).tokens) for n in range(5)
    ]
    assert drawn == [12, 12, 12, 7, 7]


def test_logits_are_left_as_they_are() -> None:
    """Oracle: a copy taken before."""
    logits = logits_of(3, rows=2)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, logit_bias=((1, 5.0),), min_tokens=2)
    chosen = sampler()
    chosen.add("a", params, [1, 2])
    chosen.sample(logits, [row(params, stop_ids=frozenset({3})), row(SamplingParams(), "b")])
    assert torch.equal(logits, before)


def test_row_tensors_stay_where_they_are() -> None:
    """Oracle: addresses and values before and after; 16-byte alignment of every column."""
    rows = RowTensors(5, "cpu")
    addresses = [t.data_ptr() for t in rows.args(5)]
    assert all(address % 16 == 0 for address in addresses)
    first = [row(SamplingParams(temperature=0.5, top_k=n, top_p=0.9, min_p=0.1), seed=-n, step=n) for n in range(5)]
    rows.fill(first)
    rows.fill([evolve(r, step=r.step + 1) for r in first])
    rows.fill([evolve(first[0], seed=9)])
    temperature, top_k, top_p, min_p, seeds, steps = rows.args(5)
    assert [t.data_ptr() for t in rows.args(5)] == addresses
    assert top_k.tolist() == [0, 1, 2, 3, 4]
    assert seeds.tolist() == [9, -1, -2, -3, -4]
    assert steps.tolist() == [0, 2, 3, 4, 5]
    for column, value in ((temperature, 0.5), (top_p, 0.9), (min_p, 0.1)):
        assert column.tolist() == pytest.approx([value] * 5)


def test_what_cannot_be_sampled_is_refused() -> None:
    """Oracle: the documented errors."""
    penalised = SamplingParams(presence_penalty=1.0)
    with pytest.raises(EngineError, match="never told"):
        sampler().sample(logits_of(0), [row(penalised)])
    with pytest.raises(UsageError, match="40 tokens"):
        sampler().add("a", SamplingParams(logit_bias=((VOCAB, 1.0),)))
    known = sampler()
    known.add("a", penalised)
    with pytest.raises(EngineError, match="already"):
        known.add("a", penalised)


def test_either_mode_of_torch_may_sample() -> None:
    """Oracle: torch itself, which refuses writes from outside to what inference mode made."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    chosen = sampler()
    with torch.inference_mode():
        chosen.add("a", params)
        chosen.sample(logits_of(1, 20), [row(params), *(row(SamplingParams(), f"r{n}") for n in range(19))])
    chosen.add("b", params)
    inside = chosen.sample(logits_of(1, 2), [row(params, "a", step=1), row(params, "b")]).tokens
    assert inside[1] == logits_of(1, 2)[1].argmax()
