"""The look-up and the fetch by kernels: launches bound to the state's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from freetoken.ops.triton_launch import memoised
from freetoken.plugin.protocols import BankPart
from freetoken_moe_offload import launches
from freetoken_moe_offload.index import IndexState

if TYPE_CHECKING:
    from torch import Tensor


class KernelIndex:
    """``index.TorchIndex`` by kernels: same arguments, same results, no host synchronisation."""

    def __init__(self, shape: launches.Shape) -> None:
        self._shape = shape
        self._mark = memoised(launches.mark)
        self._select = memoised(lambda *a: launches.select(shape, *a))
        self._place = memoised(lambda *a: launches.place(shape, *a))
        self._settle = memoised(lambda *a: launches.settle(shape, *a))

    def look_up(
        self, state: IndexState, experts: Tensor, row: int, *, first: int = 0, final: bool = True, touch: bool = False,
        keep: bool = False, cause: int = 0,
    ) -> Tensor:  # fmt: skip
        """``select``, ``place`` and ``settle``; the slots of ``experts [T, K] i32``."""
        pairs, lists = experts.numel(), state.lists
        marked = pairs > launches.MARK_PAIRS or first > 0 or not final
        if marked and first == 0:
            self._mark(pairs)(experts, state.wanted)
        self._select(pairs, row, first, marked)(experts, state.wanted, state.slot_of, state.kind, state.target, lists)
        self._place(row, keep)(state.owner, state.last, state.used, state.clock, state.kind, state.target, lists)
        out = torch.empty_like(experts)
        self._settle(pairs, row, touch, final, cause)(
            experts, out, state.owner, state.slot_of, state.last, state.used, state.clock, state.wanted, state.kind,
            state.target, lists, state.counters,
        )  # fmt: skip
        return out


class KernelFetch:
    """Brings the experts on a look-up's list from pinned host memory, on the current stream."""

    def __init__(self, layout: tuple[BankPart, ...], room: int, multiprocessors: int, timed: bool) -> None:
        self._parts = [
            (part, launches.word(part), memoised(launches.fetch)(part, room, multiprocessors, timed)) for part in layout
        ]

    def run(self, state: IndexState, host: Mapping[str, Tensor], bank: Mapping[str, Tensor]) -> None:
        """One launch a part; nothing is moved where the list is empty."""
        for part, word, launch in self._parts:
            dtype = getattr(torch, word)
            launch(_words(host[part.name], dtype), _words(bank[part.name], dtype), state.lists, state.counters)


def _words(stacked: Tensor, dtype: torch.dtype) -> Tensor:
    """``[S, *shape]`` as ``[S, words]``."""
    return stacked.view(len(stacked), -1).view(dtype)
