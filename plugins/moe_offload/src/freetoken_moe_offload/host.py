"""All experts in host memory: one region a layer, filled once, then pinned where a GPU will read it."""

from __future__ import annotations

import contextlib
import logging
import mmap
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from freetoken.plugin.protocols import BankPart
from freetoken.vocab.units import ceil_div, format_bytes
from freetoken_moe_offload.budget import PAGE_BYTES, part_bytes

_log = logging.getLogger("freetoken.offload")
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister's flags: pinned for every context, and readable by kernels


class HostLayer:
    """One layer's experts: ``parts[name] [E, *shape]``, views of one region of whole pages that nothing else shares.

    A region of its own is what makes pinning possible: the driver pins whole pages, each of them once.
    """

    def __init__(self, layer: int, layout: Sequence[BankPart], experts: int) -> None:
        self.layer = layer
        self.pinned = False
        sizes = [ceil_div(part_bytes(part) * experts, PAGE_BYTES) * PAGE_BYTES for part in layout]
        self.num_bytes = sum(sizes)
        self._region = _anonymous(max(self.num_bytes, PAGE_BYTES))
        whole = torch.frombuffer(self._region, dtype=torch.uint8)
        self.parts: dict[str, Tensor] = {}
        start = 0
        for part, size in zip(layout, sizes, strict=True):
            used = part_bytes(part) * experts
            view = whole[start : start + used].view(getattr(torch, part.dtype))
            self.parts[part.name] = view.view(experts, *part.shape)
            start += size
        self.address = whole.data_ptr()

    def put(self, expert: int, packed: Mapping[str, Tensor]) -> None:
        """Copy one packed expert in."""
        for name, tensor in packed.items():
            self.parts[name][expert].copy_(tensor)

    def pin(self) -> str:
        """Pin the region; returns why not, or ``""``. It stays pinned as long as this object lives."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cudart.cudaHostRegister(self.address, self.num_bytes, _PORTABLE | _MAPPED))
        if code:
            return f"cudaHostRegister of {format_bytes(self.num_bytes)} failed with error {code}"
        self.pinned = True
        weakref.finalize(self, _unpin, self.address, self._region)
        return ""


def _anonymous(num_bytes: int) -> mmap.mmap:
    """Fresh memory on pages of its own; in large pages where the system has them, which pin and fill faster."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, num_bytes)
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


def _unpin(address: int, region: mmap.mmap) -> None:
    """``region`` is only held, so that it is unmapped after and not before."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
    del region


class Pinner:
    """Pins layers one after the other in a thread of its own, while further weights stream in."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[HostLayer | None] = queue.SimpleQueue()
        self._refusals: list[tuple[HostLayer, str]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="pin-experts")
        self._thread.start()

    def add(self, layer: HostLayer) -> None:
        """Pin ``layer`` soon: all of its experts are in."""
        self._queue.put(layer)

    def finish(self) -> tuple[int, ...]:
        """Wait until all are done; returns the layers that stay unpinned and says why they do."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._refusals:
            unpinned = sum(layer.num_bytes for layer, _ in self._refusals)
            _log.warning(
                "%s of expert memory stay unpinned (%d layers): %s. They are copied through the host, without decode"
                " graphs, and more slowly",
                format_bytes(unpinned), len(self._refusals), self._refusals[0][1],
            )  # fmt: skip
        return tuple(layer.layer for layer, _ in self._refusals)

    def _run(self) -> None:
        try:
            with torch.cuda.device(self._device):
                while (layer := self._queue.get()) is not None:
                    reason = layer.pin()
                    if reason:
                        self._refusals.append((layer, reason))
        except BaseException as error:
            self._error = error
