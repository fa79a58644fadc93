"""The cache manager under random use. Oracles: a naive cache of whole prefixes, and a simulated device.

The naive cache keeps prefixes as token tuples and searches and evicts by brute force. The simulated device writes into
every KV position the whole prefix it stands for, and into every state row all tokens it has seen: whatever a sequence
reads must be exactly its own tokens, whoever wrote it.
"""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from freetoken.kv.audit import audit
from freetoken.kv.manager import CacheManager, StaleHandle, StateCopy

Tokens = tuple[int, ...]


class NaivePrefixes:
    """Published prefixes, whole pages each: who holds them, and when the last holder let go."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.holders: dict[Tokens, set[int]] = {}
        self.released: dict[Tokens, int] = {}
        self.clock = count()

    def longest(self, tokens: Tokens) -> int:
        usable = [len(p) for p in self.holders if len(p) < len(tokens) and tokens[: len(p)] == p]
        return max(usable, default=0)

    def hold(self, stamp: int, tokens: Tokens, length: int) -> None:
        for end in range(self.page_tokens, length + 1, self.page_tokens):
            self.holders.setdefault(tokens[:end], set()).add(stamp)

    def release(self, stamp: int) -> None:
        for prefix in sorted(self.holders, key=len, reverse=True):
            if stamp in self.holders[prefix]:
                self.holders[prefix].discard(stamp)
                self.released[prefix] = next(self.clock)

    def idle(self) -> list[Tokens]:
        return [p for p, holders in self.holders.items() if not holders]

    def evict(self) -> None:
        leaves = [p for p in self.idle() if not any(q != p and q[: len(p)] == p for q in self.holders)]
        del self.holders[min(leaves, key=self.released.__getitem__)]


class Run:
    """One running sequence as a scheduler sees it."""

    def __init__(self, seq, tokens: Tokens) -> None:
        self.seq = seq
        self.tokens = tokens
        self.computed = seq.cached_tokens
        self.started = False


class CacheMachine(RuleBasedStateMachine):
    runs = Bundle("runs")
    copies = Bundle("copies")

    @initialize(
        page_tokens=st.integers(1, 3),
        pages=st.integers(1, 12),
        hybrid=st.booleans(),
        slots=st.integers(1, 4),
        snapshots=st.integers(0, 3),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, page_tokens, pages, hybrid, slots, snapshots, prefix_cache):
        self.page_tokens = page_tokens
        self.hybrid = hybrid
        self.manager = CacheManager(
            num_pages=pages + 1,
            page_tokens=page_tokens,
            prefix_cache=prefix_cache,
            state_slots=slots if hybrid else 0,
            snapshot_slots=snapshots if hybrid else 0,
        )
        self.sharing = prefix_cache and (not hybrid or snapshots > 0)
        self.naive = NaivePrefixes(page_tokens)
        self.kv: dict[tuple[int, int], Tokens] = {}  # (page, offset) → the prefix ending there
        self.states: dict[int, Tokens] = {}
        self.usable: dict[int, Tokens] = {}  # snapshot row → its prefix, as confirmed
        self.live: list[Run] = []
        self.open_copies: set[StateCopy] = set()

    # -- what a scheduler does ------------------------------------------------------------------------------------

    @rule(target=runs, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple), match=st.booleans())
    def open(self, tokens, match):
        seq = self.manager.open(tokens, match=match or len(tokens) % 2 == 0)
        if seq is None:
            assert self.hybrid
            assert len(self.live) == self.manager.state_slots, "open refused with a state slot free"
            return None
        matched = self.naive.longest(tokens) if self.sharing and (match or len(tokens) % 2 == 0) else 0
        assert seq.matched_tokens == matched
        if not self.hybrid:
            assert seq.cached_tokens == matched
            assert seq.restore is None
            assert seq.state_slot == 0
        else:
            assert 1 <= seq.state_slot <= self.manager.state_slots
            self._check_hybrid_hit(seq, tokens, matched)
        self.naive.hold(seq.stamp, tokens, seq.cached_tokens)
        run = Run(seq, tokens)
        self.live.append(run)
        return run

    def _check_hybrid_hit(self, seq, tokens, matched):
        points = [len(p) for p in self._snapshots().values() if len(p) <= matched and tokens[: len(p)] == p]
        assert seq.cached_tokens == max(points, default=0), "not the deepest usable snapshot"
        if seq.cached_tokens == 0:
            assert seq.restore is None
        else:
            assert seq.restore.target == seq.state_slot
            assert self.states[seq.restore.source] == tokens[: seq.cached_tokens], "the snapshot changed"

    def _snapshots(self) -> dict[int, Tokens]:
        """Usable snapshots by row; their content must be what was confirmed."""
        found = {}
        for node in self.manager._tree.nodes():
            if node.snapshot is not None and node.snapshot.ready:
                found[node.snapshot.row] = tuple(t for n in node.path() for t in n.key)
        for row, prefix in found.items():
            assert self.usable[row] == prefix
            assert self.states[row] == prefix, "a usable snapshot was overwritten"
        return found

    @rule(run=runs, num=st.integers(1, 6), grow=st.lists(st.integers(0, 1), max_size=3), publish=st.booleans())
    def compute(self, run, num, grow, publish):
        """A step: up to ``num`` tokens; at the prompt's end generated tokens ``grow`` are appended for later steps."""
        if run is None or not run.seq.is_open:
            return
        end = min(run.computed + num, len(run.tokens))
        if end == run.computed or not self._reserve(run, end):
            return
        self._step(run, end)
        if end == len(run.tokens):
            run.tokens += tuple(grow)
        if publish:
            self._publish(run)

    def _reserve(self, run: Run, num_tokens: int) -> bool:
        before, pages = self.manager.stats(), list(run.seq.pages)
        missing = max(0, -(-num_tokens // self.page_tokens) - len(pages))
        idle = len(self.naive.idle())
        fits = self.manager.reserve(run.seq, num_tokens)
        assert fits == (missing <= before.pages_free + idle)
        if not fits:
            assert run.seq.pages == pages
            assert self.manager.stats() == before
            return False
        for _ in range(missing - before.pages_free):
            self.naive.evict()
        assert run.seq.pages[: len(pages)] == pages
        assert 0 not in run.seq.pages
        return True

    def _step(self, run: Run, end: int) -> None:
        seq, pages = run.seq, run.seq.pages
        if self.hybrid:
            if not run.started:
                self.states[seq.state_slot] = self.states[seq.restore.source] if seq.restore else ()
            assert self.states[seq.state_slot] == run.tokens[: run.computed], "the state is not this sequence's"
            self.states[seq.state_slot] = run.tokens[:end]
        run.started = True
        for i in range(run.computed, end):
            page = pages[i // self.page_tokens]
            others = [r for r in self.live if r is not run and page in r.seq.pages]
            assert not others, "a shared page was written"
            assert page not in {n.page for n in self.manager._tree.nodes()}, "a published page was written"
            self.kv[page, i % self.page_tokens] = run.tokens[: i + 1]
        run.computed = end

    def _publish(self, run: Run) -> None:
        before, version = list(run.seq.pages), run.seq.pages_version
        self.manager.publish(run.seq, run.tokens[: run.computed])
        assert (run.seq.pages_version > version) == (run.seq.pages != before)
        if self.sharing:
            self.naive.hold(run.seq.stamp, run.tokens, run.computed // self.page_tokens * self.page_tokens)

    @precondition(lambda self: self.hybrid)
    @rule(target=copies, run=runs)
    def snapshot(self, run):
        if run is None or not run.seq.is_open or not run.started or run.computed % self.page_tokens:
            return None
        version = len(self._snapshots())
        copy = self.manager.snapshot(run.seq, run.tokens[: run.computed])
        if self.sharing:
            self.naive.hold(run.seq.stamp, run.tokens, run.computed)
        if copy is None:
            assert len(self._snapshots()) == version, "refused, yet a snapshot went"
            return None
        assert copy.source == run.seq.state_slot
        assert copy.target > self.manager.state_slots
        assert copy.target not in {c.target for c in self.open_copies}, "two copies into one row"
        assert copy.target not in {r.seq.restore.source for r in self.live if r.seq.restore and not r.started}
        self.states[copy.target] = self.states[copy.source]
        self.usable[copy.target] = run.tokens[: run.computed]
        self.open_copies.add(copy)
        return copy

    @rule(copy=consumes(copies), made=st.booleans())
    def settle(self, copy, made):
        if copy is None:
            return
        assert copy.target not in self._snapshots(), "usable before it was confirmed"
        self.open_copies.discard(copy)
        (self.manager.confirm if made else self.manager.discard)(copy)
        with pytest.raises(ValueError, match="not an open copy"):
            self.manager.confirm(copy)

    @rule(run=consumes(runs))
    def close(self, run):
        if run is None:
            return
        self.manager.close(run.seq)
        self.naive.release(run.seq.stamp)
        self.live.remove(run)
        for use in (lambda: run.seq.pages, lambda: self.manager.publish(run.seq, run.tokens)):
            with pytest.raises(StaleHandle):
                use()

    @rule()
    def drop_cached(self):
        idle = self.naive.idle()
        assert self.manager.drop_cached() == len(idle)
        for prefix in idle:
            del self.naive.holders[prefix]

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "manager"):
            return
        audit(self.manager)
        published = {tuple(t for n in node.path() for t in n.key) for node in self.manager._tree.nodes()}
        assert published == set(self.naive.holders), "match, publish or eviction differ from the naive cache"
        stats = self.manager.stats()
        assert stats.pages_cached == len(self.naive.idle())
        assert stats.pages_used + stats.pages_cached + stats.pages_free == stats.pages_total
        if not self.live:
            assert stats.pages_used == 0
            assert self.sharing or stats.pages_free == stats.pages_total

    @invariant()
    def everyone_reads_its_own(self):
        for run in getattr(self, "live", ()):
            for i in range(run.computed):
                page = run.seq.pages[i // self.page_tokens]
                assert self.kv[page, i % self.page_tokens] == run.tokens[: i + 1], "read another's KV"
        if hasattr(self, "manager"):
            self._snapshots()

    def teardown(self):
        for run in list(getattr(self, "live", ())):
            self.manager.close(run.seq)
        if hasattr(self, "manager"):
            stats = self.manager.stats()
            assert stats.pages_used == 0
            self.manager.drop_cached()
            assert self.manager.stats().pages_free == stats.pages_total
            assert self.manager.stats().snapshots == 0


CacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase
