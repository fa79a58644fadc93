"""Host buffers that carry a step's integers to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGN_BYTES = 16  # every tensor a kernel sees starts at a multiple of this
_RING = 4  # steps that may be in flight before a buffer is written again


class Staging:
    """Packs named integer arrays into one buffer, copies it to the device, and gives views of it by name.

    On a CPU the arrays are used where they are. On a GPU a small ring of pinned buffers keeps the copy asynchronous.
    """

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self._device = device
        self._next = 0
        self._hosts: list[torch.Tensor] = []
        if device.type != "cpu":
            self._hosts = [torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)]

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The arrays as tensors on the device, in their own dtypes."""
        if not self._hosts:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        offsets, total = {}, 0
        for name, array in arrays.items():
            offsets[name] = total
            total += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        host = self._hosts[self._next]
        self._next = (self._next + 1) % _RING
        if total > host.numel():
            host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        view = host.numpy()
        for name, array in arrays.items():
            view[offsets[name] : offsets[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
        sent = host[:total].to(self._device, non_blocking=True)
        return {
            name: sent[offsets[name] : offsets[name] + array.nbytes]
            .view(getattr(torch, array.dtype.name))
            .view(array.shape)
            for name, array in arrays.items()
        }
