"""The cache manager's contract, case by case; the state machine next door has the interplay."""

from __future__ import annotations

import copy
import pickle

import pytest

from freetoken.kv.audit import audit
from freetoken.kv.manager import CacheManager, StaleHandle, StateCopy
from freetoken.vocab.errors import EngineError

P = 4


def plain(num_pages: int = 17, **more) -> CacheManager:
    return CacheManager(num_pages=num_pages, page_tokens=P, **more)


def run(manager: CacheManager, tokens, *, close: bool = True):
    """Open, compute and publish ``tokens``, as a scheduler would."""
    seq = manager.open(tokens)
    assert seq is not None
    assert manager.reserve(seq, len(tokens))
    manager.publish(seq, tokens)
    if close:
        manager.close(seq)
    return seq


def snapshot(manager: CacheManager, tokens) -> StateCopy | None:
    """Compute ``tokens`` in a sequence of its own and snapshot its end; closes it."""
    seq = run(manager, tokens, close=False)
    made = manager.snapshot(seq, tokens)
    if made:
        manager.confirm(made)
    manager.close(seq)
    return made


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 13])
def test_an_equal_prompt_hits_all_full_pages_but_computes_its_last_token(length):
    """Oracle: the formula ⌊(n − 1) / P⌋ · P."""
    manager = plain()
    tokens = list(range(length))
    run(manager, tokens)
    assert manager.open(tokens).cached_tokens == (length - 1) // P * P
    assert manager.stats().hit_tokens == 0, "counted when pages are reserved, not before"


def test_a_hit_is_the_very_pages_that_were_published():
    manager = plain()
    first = run(manager, range(10), close=False)
    second = manager.open((*range(8), 99, 100))
    assert second.pages == first.pages[:2]
    assert manager.reserve(second, 10)
    assert second.pages[2] not in first.pages
    stats = manager.stats()
    assert (stats.pages_used, stats.hit_tokens, stats.query_tokens) == (4, 8, 20)


def test_many_computing_one_prefix_end_up_sharing_it():
    """32 sequences opened before any of them published: one copy of the shared pages stays."""
    manager = plain(num_pages=1 + 32 * 4)
    prompt = list(range(13))
    seqs = [manager.open([*prompt, 100 + i]) for i in range(32)]
    for i, seq in enumerate(seqs):
        assert manager.reserve(seq, 14)
        manager.publish(seq, [*prompt, 100 + i])
    assert len({tuple(seq.pages[:3]) for seq in seqs}) == 1
    assert len({seq.pages[3] for seq in seqs}) == 32
    assert manager.stats().pages_used == 3 + 32
    assert [seq.pages_version for seq in seqs] == [0, *[1] * 31]
    for seq in seqs:
        manager.close(seq)
    assert (manager.stats().pages_used, manager.stats().pages_cached) == (0, 3)
    audit(manager)


def test_eviction_takes_the_least_recently_used_page_from_the_leaves():
    manager = plain(num_pages=1 + 6)
    run(manager, range(12))
    run(manager, range(100, 112))
    manager.close(manager.open(range(13)))  # a hit makes the first prompt the younger
    seq = manager.open([7])
    assert manager.reserve(seq, 2 * P)
    assert manager.open(range(100, 113)).matched_tokens == 4
    assert manager.open(range(13)).matched_tokens == 12
    assert manager.stats().evictions == 2


def test_locked_pages_are_not_evicted_and_a_refusal_changes_nothing():
    manager = plain(num_pages=1 + 4)
    run(manager, range(8))
    holder = manager.open(range(9))
    other = manager.open([50])
    before = manager.stats()
    assert not manager.reserve(other, 3 * P)
    assert manager.stats() == before
    assert other.pages == []
    assert manager.reserve(other, 2 * P)
    assert holder.pages == [1, 2]


def test_without_the_prefix_cache_nothing_stays():
    manager = plain(prefix_cache=False)
    seq = run(manager, range(9), close=False)
    assert seq.pages_version == 0
    manager.close(seq)
    assert manager.open(range(9)).cached_tokens == 0
    assert manager.stats().pages_free == 16


def test_match_false_computes_everything_and_still_shares_what_it_publishes():
    manager = plain()
    run(manager, range(9))
    seq = manager.open(range(9), match=False)
    assert (seq.cached_tokens, seq.pages) == (0, [])
    assert manager.reserve(seq, 9)
    manager.publish(seq, range(9))
    assert manager.stats().pages_used == 3
    assert manager.stats().pages_free == 13


def test_page_0_is_never_handed_out_and_the_pool_is_used_to_the_last_page():
    manager = plain(num_pages=1 + 3)
    seq = manager.open([1])
    assert manager.can_ever_fit(3 * P)
    assert not manager.can_ever_fit(3 * P + 1)
    assert not manager.reserve(seq, 3 * P + 1)
    assert manager.reserve(seq, 3 * P)
    assert sorted(seq.pages) == [1, 2, 3]


def test_a_stale_foreign_or_copied_handle_is_refused():
    manager, other = plain(), plain()
    seq = manager.open([1, 2])
    other.open([3])
    for misuse in (
        lambda: other.reserve(seq, 4),
        lambda: other.close(seq),
    ):
        with pytest.raises(StaleHandle):
            misuse()
    for clone in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="one owner"):
            clone(seq)
    manager.close(seq)
    for misuse in (
        lambda: seq.pages, lambda: seq.cached_tokens, lambda: seq.state_slot, lambda: seq.restore,
        lambda: seq.matched_tokens, lambda: seq.pages_version, lambda: manager.reserve(seq, 1),
        lambda: manager.publish(seq, [1]), lambda: manager.snapshot(seq, []), lambda: manager.close(seq),
        lambda: manager.snapshot_points(seq, 1, 1), lambda: manager.restored(seq),
    ):  # fmt: skip
        with pytest.raises(StaleHandle, match="closed"):
            misuse()


def test_publishing_what_was_not_reserved_or_other_tokens_than_before_is_refused():
    manager = plain()
    seq = manager.open(range(9))
    with pytest.raises(ValueError, match="9 tokens, but only 0 pages"):
        manager.publish(seq, range(9))
    assert manager.reserve(seq, 16)
    manager.publish(seq, range(9))
    with pytest.raises(ValueError, match="before position 8"):
        manager.publish(seq, [0] * 16)
    with pytest.raises(ValueError, match="at least one token"):
        manager.open([])


def test_bad_sizes_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="num_pages=1"):
        plain(num_pages=1)
    with pytest.raises(ValueError, match="snapshot_tokens=6 is not a multiple of page_tokens=4"):
        plain(snapshot_tokens=6)


def test_state_slots_run_out_and_come_back():
    manager = plain(state_slots=2, snapshot_slots=1)
    seqs = [manager.open([i]) for i in range(2)]
    assert sorted(s.state_slot for s in seqs) == [1, 2]
    assert manager.open([9]) is None
    manager.close(seqs[0])
    assert manager.open([9]).state_slot == seqs[1].state_slot % 2 + 1
    assert manager.num_state_rows == 1 + 2 + 1
    assert plain().num_state_rows == 0


def test_a_hybrid_resumes_only_from_a_confirmed_snapshot():
    manager = plain(state_slots=2, snapshot_slots=2)
    seq = run(manager, range(12), close=False)
    made = manager.snapshot(seq, range(12))
    assert made == StateCopy(seq.state_slot, 3)
    waiting = manager.open(range(20))
    assert (waiting.cached_tokens, waiting.matched_tokens, waiting.restore) == (0, 12, None)
    manager.close(waiting)
    manager.confirm(made)
    ready = manager.open(range(20))
    assert (ready.cached_tokens, ready.restore) == (12, StateCopy(3, ready.state_slot))
    assert manager.snapshot(seq, range(12)) is None, "this prefix has one"
    assert manager.stats().snapshots == 1


def test_a_snapshot_that_somebody_will_resume_from_is_not_evicted():
    manager = plain(state_slots=3, snapshot_slots=1)
    assert snapshot(manager, range(4))
    reader = manager.open(range(5))
    assert snapshot(manager, range(50, 54)) is None, "the only row is the source of a copy to come"
    manager.restored(reader)
    assert snapshot(manager, range(50, 54)) == StateCopy(2, 4)
    assert manager.open(range(5)).cached_tokens == 0
    assert manager.stats().snapshot_evictions == 1


@pytest.mark.parametrize("end", ["publish", "close"])
def test_publish_and_close_end_the_pin(end):
    manager = plain(state_slots=2, snapshot_slots=1)
    snapshot(manager, range(4))
    reader = manager.open(range(5))
    assert manager.reserve(reader, 5)
    manager.publish(reader, range(5)) if end == "publish" else manager.close(reader)
    assert snapshot(manager, range(50, 54)) is not None


def test_the_least_recently_used_snapshot_goes_first():
    manager = plain(state_slots=1, snapshot_slots=2)
    for base in (0, 100):
        snapshot(manager, range(base, base + 4))
    manager.close(manager.open(range(5)))  # used: now the one at 100 is the older
    snapshot(manager, range(200, 204))
    cached = []
    for base in (0, 100, 200):
        seq = manager.open(range(base, base + 5))
        cached.append(seq.cached_tokens)
        manager.close(seq)
    assert cached == [4, 0, 4]


def test_a_pending_row_stays_taken_when_its_prefix_is_evicted():
    manager = plain(num_pages=1 + 2, state_slots=2, snapshot_slots=1)
    seq = run(manager, range(4), close=False)
    made = manager.snapshot(seq, range(4))
    manager.close(seq)
    big = manager.open([9])
    assert manager.reserve(big, 2 * P)  # evicts the prefix
    manager.publish(big, range(8))
    assert manager.snapshot(big, range(8)) is None, "the row still waits for its copy"
    manager.confirm(made)
    assert manager.stats().snapshots == 0
    assert manager.snapshot(big, range(8)) == StateCopy(big.state_slot, 3)


def test_snapshot_wants_whole_pages_and_the_state_of_now():
    manager = plain(state_slots=1, snapshot_slots=1)
    seq = run(manager, range(9), close=False)
    with pytest.raises(ValueError, match="whole pages of 4"):
        manager.snapshot(seq, range(9))
    with pytest.raises(ValueError, match="8 tokens are published"):
        manager.snapshot(seq, range(4))


def test_snapshot_points_are_the_branch_the_prompts_end_and_free_chunk_ends():
    manager = plain(num_pages=65, state_slots=3, snapshot_slots=2)
    run(manager, range(21))
    seq = manager.open([*range(13), *range(100, 120)])
    assert seq.matched_tokens == 12
    assert manager.snapshot_points(seq, 33, 10) == (8,)
    assert manager.snapshot_points(seq, 33, 18) == (12, 16)
    assert manager.snapshot_points(seq, 33, 33) == (12, 32)
    assert manager.snapshot_points(seq, 32, 32) == (12, 28), "an equal prompt of 32 tokens could not use 32"
    for base in (1000, 2000):
        snapshot(manager, range(base, base + 4))
    assert manager.snapshot_points(seq, 33, 18) == (12,), "chunk ends never push a snapshot out"
    assert manager.snapshot_points(seq, 3, 3) == ()


def test_snapshot_points_respect_the_kernels_chunk():
    manager = plain(num_pages=65, state_slots=3, snapshot_slots=2, snapshot_tokens=8)
    run(manager, range(21))
    seq = manager.open([*range(13), *range(100, 120)])
    assert manager.snapshot_points(seq, 33, 33) == (8, 32)
    assert plain().snapshot_points is not None


def test_drop_cached_frees_pages_and_snapshots_that_nobody_uses():
    manager = plain(state_slots=2, snapshot_slots=2)
    snapshot(manager, range(8))
    keeper = manager.open(range(9))
    snapshot(manager, range(100, 112))
    assert manager.drop_cached() == 3
    assert manager.stats().snapshots == 1
    assert keeper.pages == [1, 2]


def test_the_audit_finds_a_page_with_two_owners():
    manager = plain()
    seq = run(manager, range(9), close=False)
    manager._free_pages.append(seq.pages[0])
    with pytest.raises(EngineError, match="page 1 has 2 owners"):
        audit(manager)
