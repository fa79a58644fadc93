"""A full check of a cache manager's books, for tests and for hunting a fault; far too slow for the loop."""

from __future__ import annotations

from collections import Counter

from freetoken.kv.manager import CacheManager
from freetoken.vocab.errors import EngineError


def audit(manager: CacheManager) -> None:
    """Raise ``EngineError`` naming the first broken invariant.

    Each page is free, published, or one sequence's own; each state row has one owner; a node's lock count is the number
    of running sequences on its path; evictable pages are the unlocked nodes, children before parents.
    """
    for problem in (*_page_problems(manager), *_lock_problems(manager), *_row_problems(manager)):
        raise EngineError("audit of the cache manager", problem, "this is a fault of FreeToken: please report it")


def _page_problems(manager: CacheManager) -> list[str]:
    owners: Counter[int] = Counter(manager._free_pages)
    owners.update(node.page for node in manager._tree.nodes())
    for seq in manager._live.values():
        owners.update(seq._pages[seq._published_pages :])
    problems = [f"page {page} has {count} owners" for page, count in owners.items() if count > 1]
    if set(owners) != set(range(1, manager.num_pages)):
        odd = sorted(set(owners) ^ set(range(1, manager.num_pages)))
        problems.append(f"pages {odd} are lost or foreign")
    return problems


def _lock_problems(manager: CacheManager) -> list[str]:
    holders: Counter[int] = Counter()
    problems = []
    for seq in manager._live.values():
        path = [node.page for node in seq._node.path()]
        holders.update(path)
        if path != seq._pages[: seq._published_pages]:
            problems.append(f"{seq!r} holds pages {seq._pages[: seq._published_pages]}, its path is {path}")
    order = {page: i for i, page in enumerate(manager._tree.unlocked_pages())}
    for node in manager._tree.nodes():
        if node.holders != holders[node.page]:
            problems.append(f"page {node.page} counts {node.holders} holders, {holders[node.page]} run on it")
        if (node.page in order) != (node.holders == 0):
            problems.append(f"page {node.page} has {node.holders} holders; evictable: {node.page in order}")
        parent = node.parent
        if parent is not None and parent.page in order and order[parent.page] < order.get(node.page, len(order)):
            problems.append(f"page {parent.page} would be evicted before its child {node.page}")
    return problems


def _row_problems(manager: CacheManager) -> list[str]:
    rows = manager._snapshots.rows()
    owners: Counter[int] = Counter(manager._free_slots)
    owners.update(seq._state_slot for seq in manager._live.values() if manager.state_slots)
    for some in rows.values():
        owners.update(some)
    expected = set(range(1, manager.state_slots + manager.snapshot_slots + 1))
    problems = [f"state row {row} has {count} owners" for row, count in owners.items() if count > 1]
    if set(owners) != expected:
        problems.append(f"state rows {sorted(set(owners) ^ expected)} are lost or foreign")
    for node in manager._tree.nodes():
        snapshot = node.snapshot
        if snapshot is None:
            continue
        home = "pending" if not snapshot.ready else "pinned" if snapshot.pins else "idle"
        if snapshot.row not in rows[home]:
            problems.append(f"the snapshot in row {snapshot.row} should be {home}")
    return problems
