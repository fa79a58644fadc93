"""One request's hold on the cache: a single-owner handle, stamped so that a stale one is caught."""

from __future__ import annotations

from typing import NoReturn

from attrs import frozen

from freetoken.kv.radix import Node
from freetoken.vocab.errors import EngineError


@frozen
class StateCopy:
    """Rows of the recurrent pools: the engine copies ``source`` to ``target`` in every recurrent layer."""

    source: int
    target: int


class StaleHandle(EngineError):
    """A sequence handle was used after it was closed, or with a manager that did not make it."""


class SequenceCache:
    """What one running request holds: its pages in order, its state row, and a lock on its cached prefix.

    Made by ``CacheManager.open`` and changed by the manager alone. Every read after ``close`` raises ``StaleHandle``;
    copies and pickles are refused, so there is one owner. ``stamp`` is unique over the manager's life: it is the
    generation that tells this hold from any other on the same pages and row.
    """

    __slots__ = (
        "_cached_tokens", "_counted", "_matched_tokens", "_node", "_open", "_pages", "_pages_version",
        "_prompt_tokens", "_published_pages", "_restore", "_restore_from", "_state_slot", "stamp",
    )  # fmt: skip

    def __init__(
        self, stamp: int, prompt_tokens: int, pages: list[int], node: Node, matched_tokens: int, state_slot: int,
        restore: StateCopy | None, restore_from: Node | None, page_tokens: int,
    ) -> None:  # fmt: skip
        self.stamp = stamp
        self._open = True
        self._pages = pages
        self._pages_version = 0
        self._node = node  # deepest node of the tree this sequence locks
        self._published_pages = len(pages)
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = len(pages) * page_tokens
        self._matched_tokens = matched_tokens
        self._state_slot = state_slot
        self._restore = restore
        self._restore_from = restore_from
        self._counted = False

    @property
    def pages(self) -> list[int]:
        """Page ids in order, grown by ``reserve``. The manager's list itself: read it, never change it.

        ``publish`` may replace an id by that of an equal page another sequence published first; ``pages_version``
        then grows, and page tables made earlier must be made anew (their pages may be handed out again).
        """
        self._check()
        return self._pages

    @property
    def pages_version(self) -> int:
        """Grows whenever an id already in ``pages`` was replaced; appending does not count."""
        self._check()
        return self._pages_version

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV, and for recurrent models state, need not be computed; whole pages."""
        self._check()
        return self._cached_tokens

    @property
    def matched_tokens(self) -> int:
        """Prompt tokens whose KV the tree held at ``open``. Above ``cached_tokens`` only in recurrent models, where
        no snapshot lies that deep: the prompt branches off an earlier one here, so a snapshot will pay."""
        self._check()
        return self._matched_tokens

    @property
    def state_slot(self) -> int:
        """Row of this sequence in the recurrent pools; 0 in models without recurrent layers."""
        self._check()
        return self._state_slot

    @property
    def restore(self) -> StateCopy | None:
        """The copy to do before this sequence's first step; ``None`` means that the state starts from zeros."""
        self._check()
        return self._restore

    @property
    def is_open(self) -> bool:
        return self._open

    def _check(self) -> None:
        if not self._open:
            raise StaleHandle(f"cache handle {self.stamp} was used", "it is closed; its pages may belong to others now")

    def __copy__(self) -> NoReturn:
        raise TypeError("a cache handle has one owner and cannot be copied")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a cache handle has one owner and cannot be copied")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cache handle has one owner and cannot be pickled")

    def __repr__(self) -> str:
        if not self._open:
            return f"SequenceCache(stamp={self.stamp}, closed)"
        return f"SequenceCache(stamp={self.stamp}, pages={len(self._pages)}, state_slot={self._state_slot})"
