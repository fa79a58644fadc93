"""One group's slots on the device: finds experts in them, and brings those that are missing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from freetoken.plugin.protocols import Bank
from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device
from freetoken_moe_offload.budget import Group
from freetoken_moe_offload.device_index import KernelFetch, KernelIndex
from freetoken_moe_offload.host import HostLayer
from freetoken_moe_offload.index import COUNTERS, HEADER, IndexState, TorchIndex, fill, make_state, pretend
from freetoken_moe_offload.launches import Shape, half_life

DECODE, PREFILL = 0, 1


class SlotCache:
    """``bank``: part → ``[S, *shape]``. Layers are counted by *row*, from 0, in the group's own order.

    On a GPU copies run on a stream of their own; ``wait`` makes the current stream wait for them.
    """

    def __init__(self, group: Group, slots: int, device: Device, policy: str) -> None:
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
        shape = Shape(group.experts, slots, policy != "lru", half_life(rows))
        self._index: TorchIndex | KernelIndex = TorchIndex(shape.decay, shape.half_life)
        self._fetch: KernelFetch | None = None
        if self._on_gpu:
            self._index = KernelIndex(shape)
            self._fetch = KernelFetch(group.layout, shape.room, device.multiprocessors, timed=True)
        self._stream = torch.cuda.Stream(place) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._stalls = _StallClock(self._on_gpu)
        # The experts that the slots start with: as many of each layer, the first rows get what is over.
        self._first = [slots // rows + (row < slots % rows) for row in range(rows)]
        self._filled: list[int] = []

    # -------------------------------------------------------------------------------------------- loading

    def put(self, row: int, expert: int, packed: Mapping[str, Tensor]) -> int:
        """Keep one packed expert; returns the bytes that went into a slot."""
        self.hosts[row].put(expert, packed)
        if expert >= self._first[row]:
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
        return slots

    def wait(self) -> None:
        """From here on the current stream sees the fetched experts."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

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
        if not count:
            return
        experts = lists[HEADER : HEADER + count]
        slots = lists[HEADER + state.room : HEADER + state.room + count]
        parts = self.hosts[row].parts
        with self._stalls.copying(self._stream):
            for name, target in self.bank.items():
                source = parts[name]
                for expert, slot in zip(experts, slots, strict=True):
                    target[slot].copy_(source[expert], non_blocking=True)

    # -------------------------------------------------------------------------------------------- counting

    @property
    def stall_ms(self) -> float:
        """How long computing waited for experts."""
        return self._stalls.total_ms() + self._state.counters[COUNTERS.index("decode_stall_ns")].item() / 1e6

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


class _StallClock:
    """Sums up how long computing waits for copies: on a GPU from the moment it could go on until they are done."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._total_ms = 0.0
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def copying(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Inside, copies go to ``stream``, after all that the current one has been given."""
        if stream is None:
            start = time.perf_counter()
            yield
            self._total_ms += (time.perf_counter() - start) * 1000
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
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
