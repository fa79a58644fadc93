"""Batches from rows. Oracle: the same integers, one token at a time, in plain Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.run.batch_builder import BatchBuilder, PageTables
from freetoken.run.decode_inputs import DecodeInputs
from freetoken.run.step_plan import SamplingRow, StepPlan, StepRow
from freetoken.vocab.sampling import SamplingParams

PAGE = 4
CPU = torch.device("cpu")


def sampling(name: str, step: int = 3) -> SamplingRow:
    return SamplingRow(name, SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1), seed=7, step=step)


def row(
    name: str, lane: int, tokens: list[int], prefix: int, pages: list[int], version: int = 0, *, pending: bool = False,
    sampled: bool = True,
) -> StepRow:  # fmt: skip
    sample = sampling(name) if sampled else None
    return StepRow(name, lane, tokens, prefix, pages, version, lane + 10, pending, sample)


def builder(lanes: int = 4, max_seq: int = 40) -> BatchBuilder:
    return BatchBuilder(CPU, lanes, max_seq, 64, PAGE)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = []
    for lane in draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]:
        prefix, query = draw(st.integers(0, 20)), draw(st.integers(1, 12))
        pages = draw(st.lists(st.integers(1, 99), min_size=-(-(prefix + query) // PAGE), max_size=9))
        tokens = draw(st.lists(st.integers(0, 500), min_size=query, max_size=query))
        pending = query == 1 and prefix > 0 and draw(st.booleans())
        rows.append(row(f"r{lane}", lane, tokens, prefix, pages, pending=pending, sampled=draw(st.booleans())))
    return StepPlan(tuple(rows))


@settings(max_examples=200, deadline=None)
@given(plan=plans())
def test_every_token_has_its_position_place_and_owner(plan: StepPlan) -> None:
    last_tokens = torch.tensor([1000, 1001, 1002, 1003, 9999])
    batch = builder().build(plan, last_tokens)
    tokens, positions, slots, ends, starts = [], [], [], [], [0]
    for entry in plan.rows:
        for offset, token in enumerate(entry.tokens):
            position = entry.prefix_tokens + offset
            tokens.append(1000 + entry.lane if entry.pending else token)
            positions.append(position)
            slots.append(entry.pages[position // PAGE] * PAGE + position % PAGE)
        starts.append(len(tokens))
        if entry.sample is not None:
            ends.append(len(tokens) - 1)
    assert batch.tokens.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.kv_slots.tolist() == slots
    assert batch.query_starts.tolist() == starts
    assert batch.logit_rows.tolist() == ends
    assert batch.state_slots.tolist() == [entry.state_slot for entry in plan.rows]
    assert batch.context_lens.tolist() == [entry.context_tokens for entry in plan.rows]
    assert batch.query_lens == tuple(len(entry.tokens) for entry in plan.rows)
    assert batch.prefix_lens == tuple(entry.prefix_tokens for entry in plan.rows)
    for table, entry in zip(batch.page_table.tolist(), plan.rows, strict=True):
        used = -(-entry.context_tokens // PAGE)
        assert table[:used] == entry.pages[:used]
        assert not any(table[len(entry.pages) :]), "unused entries are 0"


def test_a_table_follows_growth_replacement_and_a_new_owner() -> None:
    """Also a request that was preempted and came back to its lane: as many pages, none replaced since, but others."""
    tables = PageTables(2, 5)
    pages = [3, 4]

    def now(held: list[int], version: int = 0, name: str = "a") -> list[int]:
        found: list[int] = tables.row(row(name, 1, [0], 0, held, version)).tolist()
        return found

    assert now(pages) == [3, 4, 0, 0, 0]
    pages.append(7)
    assert now(pages) == [3, 4, 7, 0, 0]
    pages[0] = 9
    assert now(pages, version=1) == [9, 4, 7, 0, 0]
    assert now([5], name="b") == [5, 0, 0, 0, 0]
    assert now([6, 8, 2], name="b") == [6, 8, 2, 0, 0]


def test_decode_buffers_hold_the_rows_and_then_padding() -> None:
    inputs = DecodeInputs(4, 5, PAGE, scratch_lane=4, device=CPU)
    tables = PageTables(4, 5)
    rows = [row("a", 2, [11], 5, [3, 4]), row("b", 0, [0], 8, [5, 6, 7], pending=True)]
    assert inputs.fill(rows, tables) == (5, 8, 0, 0)
    expected = {
        "tokens": [11, 0, 0, 0], "positions": [5, 8, 0, 0], "kv_slots": [4 * PAGE + 1, 7 * PAGE, 0, 0],
        "state_slots": [12, 10, 0, 0], "lanes": [2, 0, 4, 4], "pending": [0, 1, 0, 0], "context_lens": [6, 9, 1, 1],
        "seeds": [7, 7, 0, 0], "steps": [3, 3, 0, 0], "top_k": [4, 4, 0, 0], "temperature": [0.5, 0.5, 0.0, 0.0],
    }  # fmt: skip
    assert {name: inputs.column(name).tolist() for name in expected} == expected
    assert inputs.page_table.tolist() == [[3, 4, 0, 0, 0], [5, 6, 7, 0, 0], [0] * 5, [0] * 5]


def test_decode_tables_are_sent_again_for_a_request_that_came_back() -> None:
    """The same request, as many pages, none replaced: yet not the same pages."""
    inputs, tables = DecodeInputs(1, 3, PAGE, scratch_lane=1, device=CPU), PageTables(1, 3)
    inputs.fill([row("a", 0, [1], 5, [3, 4])], tables)
    inputs.fill([row("a", 0, [1], 5, [8, 2])], tables)
    assert inputs.page_table.tolist() == [[8, 2, 0]]
