"""A read-only memory-mapped file: how every container hands out tensor data without copying it."""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from freetoken.vocab.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


class MappedFile:
    """One file, mapped whole. Tensors made from it keep the mapping alive, so closing is dropping.

    Opening raises ``CheckpointError`` when the file is missing, empty or unreadable. Nothing here imports torch until
    a tensor is asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size_bytes = os.fstat(file.fileno()).st_size
                if self.size_bytes == 0:
                    raise CheckpointError(f"read {path}", "the file is empty", "download it again")
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(
                f"read {path}", error.strerror or str(error), "check the path and permissions"
            ) from None

    def tensor(self, start: int, num_bytes: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A read-only view ``shape`` of ``num_bytes`` at ``start``; a copy where the file left it misaligned."""
        import torch

        element = getattr(torch, dtype)
        if num_bytes == 0:
            return torch.empty(shape, dtype=element)
        with warnings.catch_warnings():  # the mapping is read-only on purpose: nobody may write into a checkpoint
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            data = torch.frombuffer(self.buffer, dtype=torch.uint8, count=num_bytes, offset=start)
        if start % element.itemsize:
            data = data.clone()
        return data.view(element).view(shape)

    def release(self, start: int, num_bytes: int) -> None:
        """Let the kernel take back these pages of this process. They come back from the page cache when touched."""
        self._advise(mmap.MADV_DONTNEED, start, num_bytes)

    def prefetch(self, start: int, num_bytes: int) -> None:
        """Ask for these pages to be read from the disk ahead of use."""
        self._advise(mmap.MADV_WILLNEED, start, num_bytes)

    def _advise(self, advice: int, start: int, num_bytes: int) -> None:
        if num_bytes == 0:
            return
        first = start - start % mmap.PAGESIZE
        self.buffer.madvise(advice, first, min(start + num_bytes, self.size_bytes) - first)


@frozen(eq=False)
class Extent:
    """Where one tensor lies: ``num_bytes`` at ``start`` of ``file``, elements of ``dtype`` in ``shape``.

    For packed formats the elements are ``uint8`` and the last axis counts bytes.
    """

    file: MappedFile
    start: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The whole tensor as a view of the file."""
        return self.file.tensor(self.start, self.num_bytes, self.dtype, self.shape)

    def leading(self, first: int, stop: int) -> tuple[int, int]:
        """Byte range ``(start, length)`` of entries ``[first, stop)`` of the leading axis."""
        row = self.num_bytes // self.shape[0] if self.num_bytes else 0
        return self.start + first * row, (stop - first) * row
