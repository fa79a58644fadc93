"""A launch space: which kernels a step can start, as data.

The core declares the *step space*; a kernel maps a point of it, the shape it serves and the device to its launches.
The run-time launch goes through that same function, so what is declared is what runs. Launches take integers and
descriptors, never tensors. Everything here is pure data: no triton, no torch.

Alignment contract: every tensor argument's base address is a multiple of 16 bytes and so is every row; the binder
asserts it once, when a launch is bound. That is why a ``TensorArg`` carries no alignment class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from attrs import field, frozen

from freetoken.vocab.hardware import Device
from freetoken.vocab.ops import OpShape
from freetoken.vocab.sampling import SAMPLER_ROUTES


@frozen
class Range:
    """A closed range of integers: both ends are reachable."""

    low: int
    high: int

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"an empty range: {self.low} to {self.high}")

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high


@frozen
class StepSpace:
    """Every step the engine can take, as closed ranges from the configuration.

    ``tokens`` counts a step's new tokens over all sequences (tokens ≥ sequences); ``chunk`` one sequence's share;
    ``prefix`` the cached tokens before them; ``context`` prefix plus chunk, always up to the maximum sequence length.
    """

    tokens: Range
    sequences: Range
    chunk: Range
    prefix: Range
    context: Range
    decode_sequences: Range
    sampler_routes: tuple[str, ...] = SAMPLER_ROUTES

    def capped(self, max_tokens: int) -> StepSpace:
        """The same space with at most ``max_tokens`` tokens a step. The context is not capped."""
        high = max(self.tokens.low, min(self.tokens.high, max_tokens))
        return StepSpace(
            tokens=Range(self.tokens.low, high),
            sequences=Range(self.sequences.low, min(self.sequences.high, high)),
            chunk=Range(self.chunk.low, min(self.chunk.high, high)),
            prefix=self.prefix,
            context=self.context,
            decode_sequences=Range(self.decode_sequences.low, min(self.decode_sequences.high, high)),
            sampler_routes=self.sampler_routes,
        )


@frozen
class StepPoint:
    """One step: its totals and the maxima that kernels' launches depend on."""

    tokens: int
    sequences: int
    max_query: int
    max_context: int
    rows: int  # rows of logits
    decode: bool
    sampler_route: str = "fast"


@frozen
class TensorArg:
    """A tensor parameter: its dtype. The address is 16-byte aligned by contract."""

    dtype: str


LaunchArg = TensorArg | int | float | bool | None


@frozen
class TritonLaunch:
    """One launch of a Triton kernel.

    ``kernel`` is ``"module:function"`` of the ``@triton.jit`` function. ``args`` are the run-time parameters in
    signature order, ``constexprs`` the compile-time ones by name; grid and options as Triton takes them.
    """

    kernel: str
    args: tuple[tuple[str, LaunchArg], ...]
    constexprs: tuple[tuple[str, object], ...]
    grid: tuple[int, int, int] = field(eq=False)  # not part of the compilation key
    num_warps: int = 4
    num_stages: int = 3
    options: tuple[tuple[str, object], ...] = ()


@frozen
class NativeModule:
    """A module that a library builds for itself (nvcc, NVRTC). ``build`` runs in a worker, ``load`` on the device."""

    name: str
    build: Callable[[], None] = field(eq=False)
    load: Callable[[], None] = field(eq=False)


@frozen
class LibraryCall:
    """An opaque library (a GEMM): it picks kernels by rules of its own, so ``sweep`` calls it densely in tokens.

    ``sweep(tokens)`` makes one call with ``tokens`` rows on one layer's shapes; costs tens of milliseconds in all. A
    kernel that pads its rows gives in ``row_counts`` every number of rows the library is ever called with, ascending:
    the sweep is then exact. Empty means any number.
    """

    name: str
    sweep: Callable[[int], None] = field(eq=False)
    row_counts: tuple[int, ...] = ()


Launch = TritonLaunch | NativeModule | LibraryCall
Launches = Callable[[StepPoint, OpShape, Device], tuple[Launch, ...]]


class LaunchSpace(Protocol):
    """What a warmup policy sees: the steps there are, and the launches each would make, by kind.

    A *kind* is a class of layers (or the embedding, head, sampler) whose launches are equal over the whole space;
    kinds are computed, never declared. Kernels that declare no launches are ``opaque`` and can only be covered by real
    forwards.
    """

    @property
    def space(self) -> StepSpace: ...

    @property
    def kinds(self) -> tuple[str, ...]: ...

    @property
    def opaque(self) -> tuple[str, ...]: ...

    def launches(self, kind: str, point: StepPoint) -> tuple[Launch, ...]:
        """The launches of one layer of ``kind`` at ``point``, in order."""
        ...

    def keys(self, kind: str, point: StepPoint) -> frozenset[str]:
        """The exact specialisation keys of those launches, as Triton's own binder gives them."""
        ...
