"""What earlier runs tell: the file, and the experts that the slots start with."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from freetoken import LLM, SamplingParams
from freetoken.plugin.protocols import BankPart
from freetoken_moe_offload.budget import Group
from freetoken_moe_offload.cache import DECODE
from freetoken_moe_offload.popularity import MOST_FILES, blend, first_experts, read, write
from freetoken_moe_offload.strategy import OffloadExperts

GROUP = Group((BankPart("w", "float32", (2,)),), (3, 5), 4)
SHARES = {3: (0.1, 0.2, 0.7, 0.0), 5: (0.3, 0.3, 0.4, 0.0)}


# ------------------------------------------------------------------------------------------------ the file


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Oracle: a round trip, in a folder that was not there; no other file is left."""
    path = tmp_path / "experts" / "m.json"
    write(path, SHARES)
    assert read(path, (3, 5), 4).shares == SHARES
    assert [p.name for p in path.parent.iterdir()] == ["m.json"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": 9, "shares": {}}', "format 9"),
        ('{"format": 1}', "KeyError"),
        ('{"format": 1, "shares": {"3": [1, 0], "5": [1, 0]}}', "4 experts"),
        ('{"format": 1, "shares": {"3": [1, 0, 0, 0]}}', "2 layers"),
        ('{"format": 1, "shares": {"3": [1, 0, 0, NaN], "5": [1, 0, 0, 0]}}', "4 experts"),
        ('{"format": 1, "shares": {"3": [1, 0, 0, "x"], "5": [1, 0, 0, 0]}}', "ValueError"),
    ],
)
def test_a_file_that_is_of_no_use_is_ignored_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    """Oracle: the reason's words; the file stays."""
    path = tmp_path / "m.json"
    path.write_text(text)
    known = read(path, (3, 5), 4)
    assert not known.shares
    assert why in known.because
    assert path.read_text() == text


def test_old_files_are_deleted(tmp_path: Path) -> None:
    """Oracle: the number of files; the one just written is among them."""
    for number in range(MOST_FILES + 3):
        write(tmp_path / f"{number}.json", SHARES)
    left = {p.name for p in tmp_path.iterdir()}
    assert len(left) == MOST_FILES
    assert f"{MOST_FILES + 2}.json" in left


def test_new_uses_weigh_as_much_as_all_before() -> None:
    """Oracle: worked out by hand. A layer without new uses keeps what was known of it."""
    assert blend(SHARES, {3: [3, 1, 0, 0], 5: [0, 0, 0, 0]}) == {3: (0.425, 0.225, 0.35, 0.0), 5: SHARES[5]}
    assert blend({}, {3: [3, 1, 0, 0]}) == {3: (0.75, 0.25, 0.0, 0.0)}


# ------------------------------------------------------------------------------------------------ the choice


def test_the_most_used_experts_are_kept_wherever_they_are() -> None:
    """Oracle: the shares by hand: 0.7, 0.4, then both of 0.3."""
    assert first_experts(GROUP, 4, SHARES) == ({2}, {0, 1, 2})


@given(st.integers(0, 8))
def test_nothing_known_is_spread_evenly(slots: int) -> None:
    """Oracle: the first experts of each layer, whose numbers differ by one at most."""
    chosen = first_experts(GROUP, slots, {})
    assert [sorted(each) for each in chosen] == [list(range((slots + 1) // 2)), list(range(slots // 2))]


def fill(setup: Any) -> OffloadExperts:
    strategy = OffloadExperts(setup)
    for layer in range(2):
        for expert in reversed(range(6)):
            strategy.accept(layer, expert, {"gate_up": torch.full((8, 8), 10 * layer + expert * 1.0),
                                            "down": torch.zeros(8, 4)})  # fmt: skip
    strategy.seal()
    return strategy


def test_a_run_leaves_what_the_next_one_starts_with(setup_of: Any, tmp_path: Path) -> None:
    """Oracle: the experts that decode steps used. They are in slots after the next fill, which counts as such; bit for
    bit, though experts came in another order."""
    setup = evolve(setup_of(2, 6, 2, slots=4), notes=tmp_path / "notes" / "m.json")
    first = fill(setup)
    (cache,) = first._caches
    assert sorted(cache.owners()) == [0, 1, 6, 7]
    for _ in range(3):
        cache.bring(0, torch.tensor([[5, 3]], dtype=torch.int32), DECODE)
        cache.bring(1, torch.tensor([[4, 2]], dtype=torch.int32), DECODE)
    first.close()
    second = fill(setup)
    (cache,) = second._caches
    assert sorted(cache.owners()) == [3, 5, 6 + 2, 6 + 4]
    for slot, owner in enumerate(cache.owners()):
        assert cache.bank["gate_up"][slot].unique().tolist() == [10 * (owner // 6) + owner % 6]
    assert second.stats().moved_bytes == {"fill": 4 * cache.group.expert_bytes, "decode": 0, "prefill": 0, "hint": 0}


def test_a_run_without_decode_steps_leaves_the_file_alone(setup_of: Any, tmp_path: Path) -> None:
    """Oracle: the file's bytes."""
    path = tmp_path / "m.json"
    write(path, {0: (1.0, 0, 0, 0, 0, 0), 1: (1.0, 0, 0, 0, 0, 0)})
    before = path.read_bytes()
    fill(evolve(setup_of(2, 6, 2, slots=4), notes=path)).close()
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_told(
    setup_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the log. The engine ends as if nothing had happened."""
    (tmp_path / "file").write_text("")
    strategy = fill(evolve(setup_of(2, 6, 2, slots=4), notes=tmp_path / "file" / "m.json"))
    strategy._caches[0].bring(0, torch.tensor([[5, 3]], dtype=torch.int32), DECODE)
    with caplog.at_level(logging.WARNING):
        strategy.close()
    assert "not written down" in caplog.text


def test_an_engine_leaves_notes_in_its_cache_folder(checkpoint: Path, tmp_path: Path) -> None:
    """Oracle: the file, whose shares are those of the checkpoint's layers and sum to one; the next engine starts with
    the most used, and answers alike."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers, owners = [], []
    for _ in range(2):
        with LLM(
            str(checkpoint), dtype="float32", device="cpu", threads=1, moe_strategy="offload", max_seq_len=64,
            max_prefill_tokens=16, max_running_requests=2, warmup_policy="none", cache_dir=str(tmp_path),
            plugin_options={"moe-offload": {"slots": 5}},
        ) as llm:  # fmt: skip
            owners.append(set(llm.running.built.moe._caches[0].owners()))
            answers.append(llm.generate([[5, 6, 7]], params)[0].token_ids)
    (path,) = (tmp_path / "moe-offload").glob("*.json")
    shares = json.loads(path.read_text())["shares"]
    assert answers[0] == answers[1]
    assert all(abs(sum(each) - 1) < 1e-4 for each in shares.values())
    assert owners[0] != owners[1], "the second start took no notice"
