"""The radix tree of published pages: longest prefix match, locks, and LRU eviction from the leaves.

One node is one page, keyed among its siblings by the tuple of the page's tokens. Nodes that hold runs of pages would be
fewer, but have to be split and merged; here nothing ever is, and a 12,000-token prompt (750 pages) still matches in
about 0.3 ms, nearly all of it hashing and comparing tokens, which runs of pages would not save.

Eviction takes the head of one queue, in O(1). Why its head is always an unlocked leaf: a sequence locks the whole path
from the root to its deepest node, so whoever locks a child locks its parent too. A node enters the queue when its last
lock goes; releases walk from the deepest node up; hence in the queue every node stands behind all of its children. And
a node in the queue has no child outside of it, since that child would be locked and so would the node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetoken.kv.snapshots import Snapshot

PageKey = tuple[int, ...]


class Node:
    """One published page: a full page of tokens after its parent's. The root holds no page and is never evicted."""

    __slots__ = ("children", "depth", "holders", "key", "page", "parent", "snapshot")

    def __init__(self, parent: Node | None, key: PageKey, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1  # in pages
        self.children: dict[PageKey, Node] = {}
        self.holders = 0  # running sequences that lock it
        self.snapshot: Snapshot | None = None

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def page_keys(tokens: Sequence[int], first_page: int, end_page: int, page_tokens: int) -> Iterator[PageKey]:
    """The keys of pages ``first_page … end_page − 1`` of ``tokens``; stops early where ``tokens`` has no full page."""
    stream = iter(tokens[first_page * page_tokens : end_page * page_tokens])
    return zip(*[stream] * page_tokens, strict=False)  # one iterator, drawn from P times a row: no loop in Python


class PrefixTree:
    """Published pages by content. ``on_evict(node)`` is told before an evicted node is forgotten."""

    def __init__(self, page_tokens: int, on_evict: Callable[[Node], None]) -> None:
        self.page_tokens = page_tokens
        self.root = Node(None, (), 0)
        self.evictions = 0
        self._on_evict = on_evict
        self._unlocked: OrderedDict[int, Node] = OrderedDict()  # page id → node, least recently released first

    @property
    def num_unlocked(self) -> int:
        """Pages that nobody runs on: all of them can be evicted."""
        return len(self._unlocked)

    def match(self, tokens: Sequence[int], max_pages: int) -> list[Node]:
        """The nodes of the longest published prefix of ``tokens``, ``max_pages`` at most. Changes nothing."""
        nodes: list[Node] = []
        node: Node | None = self.root
        for key in page_keys(tokens, 0, max_pages, self.page_tokens):
            node = node.children.get(key)  # type: ignore[union-attr]
            if node is None:
                break
            nodes.append(node)
        return nodes

    def insert(self, parent: Node, key: PageKey, page: int) -> Node:
        """A new child of ``parent``, unlocked and not yet in the queue: the caller locks it at once."""
        node = parent.children[key] = Node(parent, key, page)
        return node

    def lock(self, node: Node) -> None:
        """One more holder of ``node``, whose parent the same holder must already lock."""
        if node.holders == 0:
            self._unlocked.pop(node.page, None)
        node.holders += 1

    def release_path(self, node: Node) -> None:
        """Give up one sequence's lock on ``node`` and everything above it."""
        while node.parent is not None:
            node.holders -= 1
            if node.holders == 0:
                self._unlocked[node.page] = node
            node = node.parent

    def evict(self) -> int:
        """Forget the least recently used unlocked leaf; returns its page, which is free now."""
        page, node = self._unlocked.popitem(last=False)
        assert not node.children, "the head of the queue is a leaf (module docstring)"
        self._on_evict(node)
        assert node.parent is not None, "the root is never in the queue"
        del node.parent.children[node.key]
        node.parent = None  # breaks the cycle: the node goes without waiting for the garbage collector
        self.evictions += 1
        return page

    def nodes(self) -> list[Node]:
        """Every node but the root; for audits and tests."""
        found, todo = [], [self.root]
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            found.append(node)
        return found[1:]

    def unlocked_pages(self) -> list[int]:
        """Evictable pages in the order they would go; for audits and tests."""
        return list(self._unlocked)
