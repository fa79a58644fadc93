"""The tensors behind the cache: built from the layers' cache specs and from nothing else. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd, prod
from mmap import ACCESS_COPY, mmap

import torch
from torch import Tensor

from freetoken.kv.sequence import StateCopy
from freetoken.vocab.cache_spec import CacheSpec, PagedKV, RecurrentState
from freetoken.vocab.dtypes import itemsize_bytes

ALIGN_BYTES = 16  # the launch space's contract: every base address is a multiple of this (vocab.launch)


class CachePools:
    """One tuple of tensors for each layer.

    - ``PagedKV`` → ``(k [pages, P, Hkv, Dk], v [pages, P, Hkv, Dv])``
    - ``RecurrentState`` → one ``[rows, *shape]`` for each of its shapes

    Each is contiguous and starts at a multiple of 16 bytes. Layers with equal specs lie in one allocation
    ``[layers, pages or rows, …]``, so that a state is copied for all of them by one kernel. Everything starts as zeros:
    masked positions are multiplied by a weight of 0, which is harmless to any finite garbage, but not to NaN.

    Windowed layers keep all pages of the context too; their window is the attention backend's affair.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], num_pages: int, page_tokens: int, state_rows: int,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        if any(isinstance(s, RecurrentState) for s in specs) and state_rows < 2:
            raise ValueError(f"state_rows={state_rows}: recurrent layers need the scratch row and at least one more")
        self.specs = tuple(specs)
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.state_rows = state_rows
        self.device = torch.device(device)
        self._allocations: list[Tensor] = []
        self._states: list[Tensor] = []  # of these, the ones that hold recurrent state: [layers, rows, *shape]
        layers: dict[int, tuple[Tensor, ...]] = {}
        for spec, indices in _grouped(self.specs).items():
            shapes: list[tuple[int, ...]]
            if isinstance(spec, PagedKV):
                shapes = [(num_pages, page_tokens, spec.heads, dim) for dim in (spec.k_dim, spec.v_dim)]
            else:
                shapes = [(state_rows, *shape) for shape in spec.shapes]
            pools = [self._allocate(len(indices), shape, spec.dtype, device) for shape in shapes]
            if isinstance(spec, RecurrentState):
                self._states += pools
            layers |= {index: tuple(pool[i] for pool in pools) for i, index in enumerate(indices)}
        self._layers = tuple(layers[i] for i in range(len(self.specs)))

    @property
    def layers(self) -> Sequence[tuple[Tensor, ...]]:
        """All layers' tensors in order: ``Step.caches``."""
        return self._layers

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Layer ``index``'s tensors: ``(k, v)`` or its states."""
        return self._layers[index]

    @property
    def bytes(self) -> int:
        """Bytes allocated, alignment included."""
        return sum(t.numel() * t.element_size() for t in self._allocations)

    def copy_state(self, copies: Iterable[StateCopy]) -> None:
        """Copy state rows in all recurrent layers, one copy after the other, without waiting for the device."""
        for copy in copies:
            for states in self._states:
                states[:, copy.target].copy_(states[:, copy.source])

    def zero_state(self, rows: Iterable[int]) -> None:
        """Zero state rows in all recurrent layers."""
        for row in rows:
            for states in self._states:
                states[:, row].zero_()

    def _allocate(self, layers: int, shape: tuple[int, ...], dtype: str, device: torch.device | str) -> Tensor:
        """Zeros ``[layers, *shape]``; the first axis of ``shape`` is padded until each layer starts aligned."""
        count, *rest = shape
        tensor = _zeros((layers, _padded(count, prod(rest), dtype), *rest), _torch_dtype(dtype), torch.device(device))
        self._allocations.append(tensor)
        return tensor[:, :count]


def pool_bytes(specs: Sequence[CacheSpec], num_pages: int, page_tokens: int, state_rows: int) -> int:
    """What ``CachePools`` of these sizes would allocate."""
    total = 0
    for spec in specs:
        if isinstance(spec, PagedKV):
            sizes = [(num_pages, page_tokens * spec.heads * dim) for dim in (spec.k_dim, spec.v_dim)]
        else:
            sizes = [(state_rows, prod(shape)) for shape in spec.shapes]
        total += sum(_padded(count, row, spec.dtype) * row * itemsize_bytes(spec.dtype) for count, row in sizes)
    return total


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU they are fresh pages of the operating system, which zeroes each when it is first used: a start
    does not wait for caches that nobody may fill (2 GB took 3 s of system time on a virtual machine). A fork's writes
    are its own."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap(-1, size, access=ACCESS_COPY), dtype=dtype).view(shape)


def _grouped(specs: Sequence[CacheSpec]) -> Mapping[CacheSpec, list[int]]:
    groups: dict[CacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault(spec, []).append(index)
    return groups


def _padded(count: int, row_elements: int, dtype: str) -> int:
    """The least number of rows, ``count`` or more, that take a multiple of ``ALIGN_BYTES``."""
    step = ALIGN_BYTES // gcd(ALIGN_BYTES, row_elements * itemsize_bytes(dtype))
    return -(-count // step) * step


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is not a dtype of torch"
    return dtype
