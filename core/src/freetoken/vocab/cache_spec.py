"""What a layer keeps between steps. The pools of ``kv`` are built from these and from nothing else."""

from __future__ import annotations

from math import prod

from attrs import frozen

from freetoken.vocab.dtypes import itemsize_bytes


@frozen
class PagedKV:
    """Keys and values in pages: two pools ``[pages, page, heads, dim]``, K and V apart.

    ``window`` is the number of most recent tokens a query may see (itself included), or ``None`` for all.
    """

    heads: int
    k_dim: int
    v_dim: int
    dtype: str
    window: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in this layer."""
        return self.heads * (self.k_dim + self.v_dim) * itemsize_bytes(self.dtype)


@frozen
class RecurrentState:
    """A state of fixed size per sequence: one pool ``[slots, *shape]`` for each entry of ``shapes``."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    @property
    def slot_bytes(self) -> int:
        """Bytes one sequence takes in this layer."""
        return sum(prod(shape) for shape in self.shapes) * itemsize_bytes(self.dtype)


CacheSpec = PagedKV | RecurrentState
