"""Snapshots of recurrent state: which rows hold one, for which prefix, and which goes first when rows run out.

A row is always in exactly one of four states: free; *pending*, handed out as the target of a copy that nobody has
confirmed; *usable*; or *pinned*, usable and the source of a copy somebody still has to do. Only free rows become
targets and only usable unpinned rows are evicted, so a published snapshot is never written again.
"""

from __future__ import annotations

from collections import OrderedDict

from freetoken.kv.radix import Node


class Snapshot:
    """The state after a node's whole prefix, in one row of the recurrent pools."""

    __slots__ = ("node", "pins", "ready", "row")

    def __init__(self, row: int, node: Node) -> None:
        self.row = row
        self.node: Node | None = node  # None once the node was evicted before the copy was confirmed
        self.ready = False
        self.pins = 0


class SnapshotRows:
    """The rows ``first_row … first_row + num_rows − 1`` and the snapshots in them."""

    def __init__(self, first_row: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self.evictions = 0
        self._free = list(range(first_row + num_rows - 1, first_row - 1, -1))
        self._pending: dict[int, Snapshot] = {}
        self._idle: OrderedDict[int, Snapshot] = OrderedDict()  # usable and unpinned, least recently used first
        self._pinned: dict[int, Snapshot] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return len(self._idle) + len(self._pinned)

    def take(self, node: Node) -> Snapshot | None:
        """A pending snapshot of ``node``, evicting the least recently used idle one when no row is free."""
        if not self._free:
            if not self._idle:
                return None
            _, oldest = self._idle.popitem(last=False)
            self._forget(oldest)
            self.evictions += 1
        snapshot = Snapshot(self._free.pop(), node)
        node.snapshot = snapshot
        self._pending[snapshot.row] = snapshot
        return snapshot

    def confirm(self, row: int) -> None:
        """The copy into ``row`` was issued: the snapshot is usable, unless its prefix was evicted meanwhile."""
        snapshot = self._pending.pop(row)
        if snapshot.node is None:
            self._free.append(row)
            return
        snapshot.ready = True
        self._idle[row] = snapshot

    def discard(self, row: int) -> None:
        """The copy into ``row`` will not happen."""
        self._forget(self._pending.pop(row))

    def is_pending(self, row: int) -> bool:
        return row in self._pending

    def pin(self, snapshot: Snapshot) -> None:
        """Keep a usable snapshot until ``unpin``: somebody will copy from it."""
        if snapshot.pins == 0:
            self._pinned[snapshot.row] = self._idle.pop(snapshot.row)
        snapshot.pins += 1

    def unpin(self, snapshot: Snapshot) -> None:
        snapshot.pins -= 1
        if snapshot.pins == 0:
            self._idle[snapshot.row] = self._pinned.pop(snapshot.row)

    def drop(self, node: Node) -> None:
        """``node`` is being evicted. A pending row stays taken until its copy is confirmed or discarded."""
        snapshot = node.snapshot
        if snapshot is None:
            return
        if snapshot.ready:
            del self._idle[snapshot.row]  # a pinned one hangs on a locked node, which is never evicted
            self._forget(snapshot)
        else:
            snapshot.node = node.snapshot = None

    def _forget(self, snapshot: Snapshot) -> None:
        if snapshot.node is not None:
            snapshot.node.snapshot = None
            snapshot.node = None
        self._free.append(snapshot.row)

    def rows(self) -> dict[str, list[int]]:
        """Every row by its state; for audits and tests."""
        return {
            "free": list(self._free),
            "pending": list(self._pending),
            "idle": list(self._idle),
            "pinned": list(self._pinned),
        }
