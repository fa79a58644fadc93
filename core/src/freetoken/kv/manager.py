"""The cache manager: pages, shared prefixes and recurrent-state rows for all running sequences. Integers only.

The engine calls it from one thread, between steps. It hands out ids of pages and rows and says which copies of state to
make; the tensors are ``kv.pool``'s. Everything takes time in proportion to the pages it touches, never to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from freetoken.kv.radix import Node, PrefixTree, page_keys
from freetoken.kv.sequence import SequenceCache, StaleHandle, StateCopy
from freetoken.kv.snapshots import SnapshotRows
from freetoken.vocab.units import ceil_div

__all__ = ["CacheManager", "CacheStats", "SequenceCache", "StaleHandle", "StateCopy"]


@frozen
class CacheStats:
    """Gauges and counters. ``pages_total = pages_used + pages_cached + pages_free``; scratch pages are not counted.

    ``pages_used`` are held by running sequences (a shared page counts once), ``pages_cached`` by nobody. Tokens are
    counted once a request, when it first gets its pages.
    """

    pages_total: int
    pages_used: int
    pages_cached: int
    pages_free: int
    hit_tokens: int
    query_tokens: int
    snapshots: int
    evictions: int
    snapshot_evictions: int = 0
    sequences: int = 0
    state_slots_free: int = 0


class CacheManager:
    """Owns every page and row.

    Page 0 is the scratch page, where padding is written, and state row 0 the scratch row; neither is handed out. Rows
    ``1 … state_slots`` belong to running sequences, the ``snapshot_slots`` rows after them to snapshots. The KV pools
    must have ``num_pages`` pages and the recurrent pools ``num_state_rows`` rows.

    ``snapshot_tokens`` (a multiple of ``page_tokens``, by default equal) is what the suggested snapshot points are
    rounded down to: a recurrent kernel's chunk, so that a resumed prefill cuts its chunks where a whole one would.
    """

    def __init__(
        self, *, num_pages: int, page_tokens: int, prefix_cache: bool = True, state_slots: int = 0,
        snapshot_slots: int = 0, snapshot_tokens: int | None = None,
    ) -> None:  # fmt: skip
        if num_pages < 2 or page_tokens < 1 or state_slots < 0 or snapshot_slots < 0:
            raise ValueError(
                f"num_pages={num_pages} (≥ 2: page 0 is scratch), page_tokens={page_tokens} (≥ 1), "
                f"state_slots={state_slots}, snapshot_slots={snapshot_slots} (≥ 0)"
            )
        self.snapshot_tokens = snapshot_tokens or page_tokens
        if self.snapshot_tokens % page_tokens:
            raise ValueError(f"snapshot_tokens={snapshot_tokens} is not a multiple of page_tokens={page_tokens}")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.state_slots = state_slots
        self.snapshot_slots = snapshot_slots
        # Without a snapshot a recurrent model can resume nowhere, so that sharing its pages would win nothing.
        self._sharing = prefix_cache and (state_slots == 0 or snapshot_slots > 0)
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._free_slots = list(range(state_slots, 0, -1))
        self._snapshots = SnapshotRows(state_slots + 1, snapshot_slots)
        self._tree = PrefixTree(page_tokens, on_evict=self._snapshots.drop)
        self._live: dict[int, SequenceCache] = {}
        self._next_stamp = 1
        self._hit_tokens = 0
        self._query_tokens = 0

    @property
    def num_state_rows(self) -> int:
        """Rows the recurrent pools must have; 0 for models without recurrent layers."""
        return 1 + self.state_slots + self.snapshot_slots if self.state_slots else 0

    def open(self, tokens: Sequence[int], *, match: bool = True) -> SequenceCache | None:
        """A hold on the longest usable cached prefix of ``tokens``; ``None`` when no state slot is free.

        The prefix is whole pages and shorter than ``tokens``, so that at least the last token is computed; in recurrent
        models it ends at a usable snapshot. With ``match=False`` nothing cached is used (every position's logits are
        wanted); what is computed may still be published.
        """
        if not tokens:
            raise ValueError("a sequence needs at least one token")
        if self.state_slots and not self._free_slots:
            return None
        nodes = self._tree.match(tokens, (len(tokens) - 1) // self.page_tokens) if match and self._sharing else []
        matched_tokens = len(nodes) * self.page_tokens
        restore_from = None
        if self.state_slots:
            restore_from = next((n for n in reversed(nodes) if n.snapshot is not None and n.snapshot.ready), None)
            nodes = nodes[: restore_from.depth] if restore_from else []
        lock = self._tree.lock
        for node in nodes:
            lock(node)
        state_slot = self._free_slots.pop() if self.state_slots else 0
        restore = None
        if restore_from is not None and restore_from.snapshot is not None:
            self._snapshots.pin(restore_from.snapshot)
            restore = StateCopy(restore_from.snapshot.row, state_slot)
        seq = SequenceCache(
            self._next_stamp, len(tokens), [n.page for n in nodes], nodes[-1] if nodes else self._tree.root,
            matched_tokens, state_slot, restore, restore_from, self.page_tokens,
        )  # fmt: skip
        self._live[seq.stamp] = seq
        self._next_stamp += 1
        return seq

    def reserve(self, seq: SequenceCache, num_tokens: int) -> bool:
        """Grow ``seq.pages`` for a context of ``num_tokens``, evicting cached pages as needed.

        ``False``: free and evictable pages together are too few, and nothing was changed.
        """
        self._check(seq)
        free = self._free_pages
        missing = ceil_div(num_tokens, self.page_tokens) - len(seq._pages)
        if missing > len(free) + self._tree.num_unlocked:
            return False
        while len(free) < missing:
            free.append(self._tree.evict())
        for _ in range(missing):
            seq._pages.append(free.pop())
        if not seq._counted:
            self._count(seq)
        return True

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a context of ``num_tokens`` fits a pool that nobody else uses."""
        return ceil_div(num_tokens, self.page_tokens) <= self.num_pages - 1

    def publish(self, seq: SequenceCache, tokens: Sequence[int]) -> None:
        """The KV of ``tokens`` (the sequence's own, from its first) is computed: their full pages become shareable.

        Costs the pages not published before; call it when a page has filled. Where another sequence published an equal
        page first, ``seq`` adopts it and gives its own copy back at once, so that every page of the tree is there once
        however many sequences computed it; ``seq.pages_version`` grows. From here on the pages are read-only: a
        sequence writes at positions from ``len(tokens)`` on.
        """
        self._check(seq)
        self._restored(seq)
        full = len(tokens) // self.page_tokens
        if not self._sharing or full <= seq._published_pages:
            return
        if full > len(seq._pages):
            raise ValueError(f"publish: {len(tokens)} tokens, but only {len(seq._pages)} pages are reserved")
        done = seq._published_pages * self.page_tokens
        if done and tuple(tokens[done - self.page_tokens : done]) != seq._node.key:
            raise ValueError(f"publish: the tokens before position {done} are not those published before")
        node, pages, adopted = seq._node, seq._pages, False
        keys = page_keys(tokens, seq._published_pages, full, self.page_tokens)
        for index, key in enumerate(keys, seq._published_pages):
            child = node.children.get(key)
            if child is None:
                child = self._tree.insert(node, key, pages[index])
            else:
                self._free_pages.append(pages[index])
                pages[index] = child.page
                adopted = True
            self._tree.lock(child)
            node = child
        seq._node = node
        seq._published_pages = full
        seq._pages_version += adopted

    def snapshot_points(self, seq: SequenceCache, num_prompt_tokens: int, chunk_end: int) -> tuple[int, ...]:
        """Where a snapshot will pay among the prompt positions up to ``chunk_end``, ascending; changes nothing.

        A scheduler that would compute up to ``chunk_end`` stops at the first point beyond what is computed, takes a
        snapshot there, and goes on. Points are where this prompt branches off an earlier one, and the last place an
        equal prompt could resume from (always before its last token). While rows are free ``chunk_end`` itself,
        rounded down, is one too; chunk ends never push out a snapshot that is in use.
        """
        self._check(seq)
        if not self._sharing or not self.state_slots:
            return ()
        wanted = [seq._matched_tokens, num_prompt_tokens - 1]
        if self._snapshots.num_free:
            wanted.append(min(chunk_end, num_prompt_tokens - 1))
        points = {tokens // self.snapshot_tokens * self.snapshot_tokens for tokens in wanted}
        return tuple(sorted(p for p in points if seq._cached_tokens < p <= chunk_end))

    def snapshot(self, seq: SequenceCache, tokens: Sequence[int]) -> StateCopy | None:
        """The state after ``tokens`` is in ``seq.state_slot`` now: publish them, and the copy to make of it.

        ``len(tokens)`` must be a multiple of ``page_tokens``. The engine makes the copy before the sequence's next step
        and before anybody else steps in that row, then calls ``confirm`` (or ``discard``); until then nobody resumes
        from it. ``None``: nothing to gain (no snapshots here, or this prefix has one), or no row can be freed.
        """
        self._check(seq)
        if len(tokens) % self.page_tokens:
            raise ValueError(f"snapshot: {len(tokens)} tokens are not whole pages of {self.page_tokens}")
        self.publish(seq, tokens)
        if not self._sharing or not self.state_slots or not tokens:
            return None
        published = seq._published_pages * self.page_tokens
        if published != len(tokens):
            raise ValueError(
                f"snapshot: {published} tokens are published, so the state cannot be that of {len(tokens)}"
            )
        if seq._node.snapshot is not None:
            return None
        snapshot = self._snapshots.take(seq._node)
        return StateCopy(seq._state_slot, snapshot.row) if snapshot else None

    def confirm(self, copy: StateCopy) -> None:
        """``copy``, from ``snapshot``, was made (or stands in the device's queue before any later step)."""
        self._check_pending(copy)
        self._snapshots.confirm(copy.target)

    def discard(self, copy: StateCopy) -> None:
        """``copy``, from ``snapshot``, will not be made: its row is free again."""
        self._check_pending(copy)
        self._snapshots.discard(copy.target)

    def restored(self, seq: SequenceCache) -> None:
        """``seq.restore`` was made; its snapshot may be evicted again. ``publish``, ``snapshot`` and ``close`` imply
        this."""
        self._check(seq)
        self._restored(seq)

    def close(self, seq: SequenceCache) -> None:
        """End the hold at once. Published pages stay cached until evicted; all others, and the state row, are free."""
        self._check(seq)
        self._restored(seq)
        del self._live[seq.stamp]
        seq._open = False
        own = seq._pages[seq._published_pages :]
        own.reverse()
        self._free_pages.extend(own)
        self._tree.release_path(seq._node)
        if seq._state_slot:
            self._free_slots.append(seq._state_slot)

    def drop_cached(self) -> int:
        """Forget every cached page that nobody runs on, with its snapshots; returns how many pages that freed."""
        dropped = self._tree.num_unlocked
        for _ in range(dropped):
            self._free_pages.append(self._tree.evict())
        return dropped

    def stats(self) -> CacheStats:
        total, free, cached = self.num_pages - 1, len(self._free_pages), self._tree.num_unlocked
        return CacheStats(
            pages_total=total,
            pages_used=total - free - cached,
            pages_cached=cached,
            pages_free=free,
            hit_tokens=self._hit_tokens,
            query_tokens=self._query_tokens,
            snapshots=self._snapshots.num_usable,
            evictions=self._tree.evictions,
            snapshot_evictions=self._snapshots.evictions,
            sequences=len(self._live),
            state_slots_free=len(self._free_slots),
        )

    def _count(self, seq: SequenceCache) -> None:
        seq._counted = True
        self._query_tokens += seq._prompt_tokens
        self._hit_tokens += seq._cached_tokens

    def _restored(self, seq: SequenceCache) -> None:
        node: Node | None = seq._restore_from
        if node is not None and node.snapshot is not None:
            self._snapshots.unpin(node.snapshot)
            seq._restore_from = None

    def _check(self, seq: SequenceCache) -> None:
        if self._live.get(seq.stamp) is not seq:
            raise StaleHandle(
                f"cache handle {seq.stamp} was used",
                "it is closed, or another manager made it",
                "open a new one; a handle ends with close()",
            )

    def _check_pending(self, copy: StateCopy) -> None:
        if not self._snapshots.is_pending(copy.target):
            raise ValueError(f"{copy} is not an open copy: it was confirmed, discarded, or not made by snapshot()")
