"""The weight stream: stored tensors, in file order, handed over slot by slot with a few slots in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from freetoken.vocab.units import GIB, MIB
from freetoken.vocab.weight import Source, StoredTensor, WeightSlot
from freetoken.weights.checkpoint import Checkpoint
from freetoken.weights.dummy import dummy_weights
from freetoken.weights.mapped_file import Extent
from freetoken.weights.slots import check_slots

Deliver = Callable[[WeightSlot, Sequence[StoredTensor]], None]
"""Takes one complete slot: its tensors in the order of its sources, valid only until the call returns."""

Report = Callable[[float, str], None]
"""Progress: a fraction from 0 to 1, and a detail for people."""

PREFETCH_BYTES = 64 * MIB
_REPORT_STEP = 0.01


def load_weights(
    checkpoint: Checkpoint,
    slots: Sequence[WeightSlot],
    deliver: Deliver,
    *,
    dtype: str,
    device: str = "cpu",
    ignored: Iterable[str] = (),
    report: Report | None = None,
    workers: int = 1,
) -> None:
    """Deliver every slot once; with several ``workers`` in as many threads, in file order of their beginnings.

    Tensors of a real checkpoint are views of its files in the stored format; their pages are given back as soon as
    ``deliver`` returns, so that a checkpoint is never in memory twice. A ``dummy`` checkpoint's are made in ``dtype``
    on ``device``. Raises ``CheckpointError`` before the first delivery where ``check_slots`` would; stored tensors
    matching a regular expression of ``ignored`` may stay unused.
    """
    if checkpoint.kind == "dummy":
        total = len(slots)
        for done, (slot, tensors) in enumerate(dummy_weights(slots, dtype=dtype, device=device), start=1):
            deliver(slot, tensors)
            if report is not None and (done == total or done % max(1, total // 100) == 0):
                report(done / total, f"{done} of {total} parameters made up")
        return
    check_slots(checkpoint.index, slots, ignored=ignored, formats=checkpoint.format_names)
    stream = _Stream(checkpoint, slots, deliver, report)
    if workers == 1:
        stream.run(_at_once)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
        stream.run(pool.submit, in_flight=workers)


def _at_once(deliver: Deliver, slot: WeightSlot, tensors: Sequence[StoredTensor]) -> Future[None]:
    deliver(slot, tensors)
    done: Future[None] = Future()
    done.set_result(None)
    return done


class _Stream:
    def __init__(
        self, checkpoint: Checkpoint, slots: Sequence[WeightSlot], deliver: Deliver, report: Report | None
    ) -> None:
        self._checkpoint, self._deliver, self._report = checkpoint, deliver, report
        files = dict.fromkeys(e.file for entry in checkpoint.entries.values() for e in entry.parts.values())
        self._file_order = {file: at for at, file in enumerate(files)}
        self._slots = sorted(slots, key=self._position)
        self._sizes = [sum(self._source_bytes(s) for s in slot.sources) for slot in self._slots]
        self._last_use = {s.tensor: at for at, slot in enumerate(self._slots) for s in slot.sources}
        self._open: dict[str, StoredTensor] = {}  # views that a later slot takes from too
        self._reported = 0.0

    def run(
        self, submit: Callable[[Deliver, WeightSlot, Sequence[StoredTensor]], Future[None]], in_flight: int = 1
    ) -> None:
        """Hand every slot to ``submit``; at most ``in_flight`` are under way."""
        flying: deque[tuple[int, Future[None]]] = deque()
        done, ahead, ahead_bytes = 0, 0, 0
        for at, slot in enumerate(self._slots):
            while ahead < len(self._slots) and ahead_bytes < done + PREFETCH_BYTES:
                self._prefetch(self._slots[ahead])
                ahead_bytes += self._sizes[ahead]
                ahead += 1
            flying.append((at, submit(self._deliver, slot, self._taken(slot))))
            if len(flying) >= in_flight:
                done += self._landed(*flying.popleft(), done)
        while flying:
            done += self._landed(*flying.popleft(), done)

    def _landed(self, at: int, delivery: Future[None], done: int) -> int:
        """Wait for one delivery and give its pages back; its bytes."""
        delivery.result()
        slot = self._slots[at]
        self._release(slot, at)
        self._tell(done + self._sizes[at], slot)
        return self._sizes[at]

    def _taken(self, slot: WeightSlot) -> tuple[StoredTensor, ...]:
        out = []
        for source in slot.sources:
            stored = self._open.get(source.tensor)
            if stored is None:
                stored = self._open[source.tensor] = self._checkpoint.read(source.tensor)
            out.append(self._checkpoint.codec(stored.format).take(stored, source))
        return tuple(out)

    def _release(self, slot: WeightSlot, at: int) -> None:
        for source in slot.sources:
            whole = self._last_use[source.tensor] == at  # neighbours' pages mapped along the way go too
            if whole:
                self._open.pop(source.tensor, None)
            for extent in self._checkpoint.entries[source.tensor].parts.values():
                start, length = (extent.start, extent.num_bytes) if whole else _range(extent, source)
                extent.file.release(start, length)

    def _prefetch(self, slot: WeightSlot) -> None:
        for source in slot.sources:
            for extent in self._checkpoint.entries[source.tensor].parts.values():
                extent.file.prefetch(*_range(extent, source))

    def _position(self, slot: WeightSlot) -> tuple[int, int]:
        first = slot.sources[0]
        extent = next(iter(self._checkpoint.entries[first.tensor].parts.values()))
        return self._file_order[extent.file], _range(extent, first)[0]

    def _source_bytes(self, source: Source) -> int:
        return sum(_range(extent, source)[1] for extent in self._checkpoint.entries[source.tensor].parts.values())

    def _tell(self, done: int, slot: WeightSlot) -> None:
        total = sum(self._sizes)
        fraction = done / total if total else 1.0
        if self._report is not None and (fraction >= self._reported + _REPORT_STEP or done == total):
            self._reported = fraction
            self._report(fraction, f"{done / GIB:.1f} of {total / GIB:.1f} GiB, {slot.name}")


def _range(extent: Extent, source: Source) -> tuple[int, int]:
    """The bytes that ``source`` reads of one part; all of them where the piece is not a run of the file."""
    if source.index is not None:
        start, length = extent.leading(source.index, source.index + 1)
        rows_axis = 1
    else:
        start, length, rows_axis = extent.start, extent.num_bytes, 0
    if source.rows is None or source.transpose or len(extent.shape) <= rows_axis or extent.shape[rows_axis] == 0:
        return start, length
    row = length // extent.shape[rows_axis]
    return start + source.rows[0] * row, (source.rows[1] - source.rows[0]) * row
