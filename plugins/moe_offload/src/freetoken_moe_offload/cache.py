"""One group's slots on the device: finds experts in them, and brings those that are missing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from freetoken.plugin.protocols import Bank
from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device
from freetoken_moe_offload.budget import Group
from freetoken_moe_offload.device_index import KernelFetch, KernelIndex
from freetoken_moe_offload.foresight import room_ahead
from freetoken_moe_offload.host import HostLayer
from freetoken_moe_offload.index import (
    COUNTERS,
    HEADER,
    HIT,
    MISS,
    IndexState,
    TorchIndex,
    ahead,
    fill,
    give,
    make_state,
    on_host,
    popularity,
    pretend,
)
from freetoken_moe_offload.launches import Shape, half_life

DECODE, PREFILL = 0, 1


class SlotCache:
    """``bank``: part → ``[S, *shape]``. Layers are counted by *row*, from 0, in the group's own order.

    On a GPU copies run on a stream of their own; ``wait`` makes the current stream wait for those of one look-up, which
    ``arrived`` stands for right after it. ``first`` are the experts of each row that the slots start with.
    """

    def __init__(self, group: Group, slots: int, device: Device, policy: str, first: Sequence[frozenset[int]]) -> None:
        self.group = group
        self.slots = slots
        self._on_gpu = device.kind == "cuda"
        place = torch.device(device.torch_name)
        self.bank: Bank = {
            part.name: torch.zeros(slots, *part.shape, dtype=getattr(torch, part.dtype), device=place)
            for part in group.layout
        }
        self.hosts = [HostLayer(layer, group.layout, group.experts) for layer in group.layers]
        rows = len(group.layers)
        self._state = make_state(rows, group.experts, slots, place)
        self._scratch = make_state(rows, group.experts, slots, place)
        pretend(self._scratch)
        self.rehearsing = False
        shape = self._shape = Shape(group.experts, slots, policy != "lru", half_life(rows))
        self._index: TorchIndex | KernelIndex = TorchIndex(shape.decay, shape.half_life)
        self._fetch: KernelFetch | None = None
        if self._on_gpu:
            self._index = KernelIndex(shape)
            self._fetch = KernelFetch(group.layout, shape.room, device.multiprocessors, timed=True)
        self._stream = torch.cuda.Stream(place) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._stalls = _StallClock(self._on_gpu)
        self.arrived: torch.cuda.Event | None = None
        self._first = first
        self._ahead = _Ahead()
        self._filled: list[int] = []

    # -------------------------------------------------------------------------------------------- loading

    def put(self, row: int, expert: int, packed: Mapping[str, Tensor]) -> int:
        """Keep one packed expert; returns the bytes that went into a slot."""
        self.hosts[row].put(expert, packed)
        if expert not in self._first[row]:
            return 0
        slot = len(self._filled)
        for name, part in packed.items():
            self.bank[name][slot].copy_(part)
        self._filled.append(row * self.group.experts + expert)
        return self.group.expert_bytes

    def seal(self) -> None:
        """Enter the experts that came into slots while loading."""
        fill(self._state, self._filled)

    # -------------------------------------------------------------------------------------------- a step

    def capturable(self, row: int) -> bool:
        """Whether a look-up of this layer needs nothing from the host."""
        return self._fetch is not None and self.hosts[row].pinned

    def bring(self, row: int, experts: Tensor, cause: int, *, first: int = 0, final: bool = True) -> Tensor:
        """Find ``experts [T, K]`` and start fetching those that are missing; their slots, −1 beyond this pass.

        Prefill keeps the layer's own experts, and what it fetches leaves first: a long prompt sweeps through a few
        slots and spares the rest.
        """
        capturing = self._on_gpu and torch.cuda.is_current_stream_capturing()
        state = self._scratch if self.rehearsing and not capturing else self._state
        decode = cause == DECODE
        slots = self._index.look_up(
            state, experts, row, first=first, final=final, touch=decode, keep=not decode, cause=cause
        )
        if decode and self.capturable(row):
            self._fetch_on_device(state, row)
        elif capturing:
            raise EngineError(
                f"a decode graph over layer {self.hosts[row].layer}",
                "its experts lie in memory that could not be pinned, so that only the host can copy them",
                "start with --no-cuda-graphs",
            )
        else:
            self._fetch_by_host(state, row)
        if self._stream is not None:
            self.arrived = self._stream.record_event()
        return slots

    def wait(self, arrived: torch.cuda.Event | None) -> None:
        """From here on the current stream sees what had been fetched when ``arrived`` was noted."""
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)

    def _fetch_on_device(self, state: IndexState, row: int) -> None:
        assert self._fetch is not None
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._fetch.run(state, self.hosts[row].parts, self.bank)

    def _fetch_by_host(self, state: IndexState, row: int) -> None:
        """Reads the list, and copies expert by expert: whole runs of memory, by the copy engine on a GPU."""
        lists = state.lists.tolist()
        count = lists[0]
        waited = self._ahead.row == row
        if waited and state is self._state:
            self._ahead.meet(state.kind.tolist())
        if not count and not waited:
            return
        experts = lists[HEADER : HEADER + count]
        slots = lists[HEADER + state.room : HEADER + state.room + count]
        with self._stalls.copying(self._stream, from_now=waited):
            self._copy(row, experts, slots)

    def _copy(self, row: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        parts = self.hosts[row].parts
        for name, target in self.bank.items():
            source = parts[name]
            for expert, slot in zip(experts, slots, strict=True):
                target[slot].copy_(source[expert], non_blocking=True)

    # -------------------------------------------------------------------------------------------- ahead of need

    @property
    def room_ahead(self) -> int:
        """How many experts may be brought before their layer is asked for."""
        return 0 if self.rehearsing else room_ahead(self.slots, self.group.experts)

    def bring_ahead(self, row: int, experts: Sequence[int], guarded: int) -> None:
        """Start fetching those of ``experts`` that are missing, as far as there is room; never into a slot of layer
        ``guarded`` (−1: none), which is still to be computed. Decided on the host, while the link is busy anyway."""
        host = on_host(self._state)
        missing, slots = ahead(
            host, row, experts, guarded, self.room_ahead, self._shape.decay, self._shape.half_life
        )  # fmt: skip
        if not missing:
            return
        give(host, row, torch.tensor(missing, dtype=torch.int32), torch.tensor(slots))
        if host is not self._state:
            self._state.owner.copy_(host.owner)
            self._state.slot_of.copy_(host.slot_of)
        self._ahead.begin(row, missing)
        if self._stream is None:
            with self._stalls.copying(None):
                self._copy(row, missing, slots)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(row, missing, slots)
        self._ahead.arrived = self._stream.record_event()

    def join_ahead(self) -> None:
        """The current stream waits for what was fetched ahead: another step might find it, or need its slots."""
        self.wait(self._ahead.arrived)
        self._ahead.arrived = None

    def end_ahead(self) -> tuple[int, int] | None:
        """The layer fetched for is done, or will not come: how many experts were useful, and how many were not."""
        return self._ahead.end()

    # -------------------------------------------------------------------------------------------- counting

    @property
    def stall_ms(self) -> float:
        """How long computing waited for experts."""
        return self._stalls.total_ms() + self._state.counters[COUNTERS.index("decode_stall_ns")].item() / 1e6

    @property
    def ahead_bytes(self) -> tuple[int, int]:
        """Bytes fetched before they were asked for, and those of them that nobody wanted in time."""
        size = self.group.expert_bytes
        return self._ahead.fetched * size, self._ahead.wasted * size

    def uses(self) -> dict[int, list[int]]:
        """How often each expert was used of late, by layer."""
        every, experts = popularity(self._state, self._shape.half_life), self.group.experts
        return {layer: every[row * experts : (row + 1) * experts] for row, layer in enumerate(self.group.layers)}

    def counts(self) -> dict[str, int]:
        """Hits and misses by cause."""
        return dict(zip(COUNTERS, self._state.counters.tolist(), strict=False))

    def owners(self) -> list[int]:
        """The table number of each slot's expert, −1 where it is empty; and a check that both tables agree."""
        owner, slot_of = self._state.owner.tolist(), self._state.slot_of.tolist()
        for number, slot in enumerate(slot_of):
            if slot >= 0 and owner[slot] != number:
                raise EngineError(f"slot {slot}", f"the table gives it to {number}, itself says {owner[slot]}")
        held = [number for number in owner if number >= 0]
        if len(held) != len(set(held)) or len(held) != sum(slot >= 0 for slot in slot_of):
            raise EngineError("the slots", f"they hold {held}, the table {slot_of}")
        return list(owner)


class _Ahead:
    """The experts of one row that were fetched before it was asked for, and what became of them."""

    def __init__(self) -> None:
        self.row = -1
        self.arrived: torch.cuda.Event | None = None
        self.fetched = self.wasted = 0
        self._waiting: set[int] = set()
        self._useful = 0
        self._lost = 0

    def begin(self, row: int, experts: Sequence[int]) -> None:
        self.row, self._waiting = row, set(experts)
        self._useful = self._lost = 0
        self.fetched += len(experts)

    def meet(self, kinds: Sequence[int]) -> None:
        """A look-up of the row: ``kinds`` says which experts it wants and found."""
        found = {expert for expert in self._waiting if kinds[expert] == HIT}
        gone = {expert for expert in self._waiting if kinds[expert] >= MISS}
        self._useful += len(found)
        self._lost += len(gone)
        self._waiting -= found | gone

    def end(self) -> tuple[int, int] | None:
        if self.row < 0:
            return None
        wasted = self._lost + len(self._waiting)
        self.wasted += wasted
        self.row, self._waiting = -1, set()
        return self._useful, wasted


class _StallClock:
    """Sums up how long computing waits for copies: on a GPU from the moment it could go on until they are done."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._total_ms = 0.0
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def copying(self, stream: torch.cuda.Stream | None, *, from_now: bool = False) -> Iterator[None]:
        """Inside, copies go to ``stream``, after all that the current one has been given. ``from_now``: earlier copies
        on it are waited for too."""
        if stream is None:
            start = time.perf_counter()
            yield
            self._total_ms += (time.perf_counter() - start) * 1000
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if from_now:
            begin.record()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if not from_now:
                begin.record()
            yield
            end.record()
        self._open.append((begin, end))

    def total_ms(self) -> float:
        """Of all copies that are done. Those of a prompt overlap its later chunks: this is an upper bound."""
        still = []
        for begin, end in self._open:
            if end.query():  # type: ignore[no-untyped-call]
                self._total_ms += begin.elapsed_time(end)
            else:
                still.append((begin, end))
        self._open = still
        return self._total_ms
