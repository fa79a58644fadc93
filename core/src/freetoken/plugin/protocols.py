"""The run-time seams: what the engine calls, frozen early because all else leans on them.

Shapes follow the legend in ``vocab.batch``. Nothing here is a hook: the loop calls these objects directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from freetoken.vocab.batch import Batch
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import LaunchSpace
from freetoken.vocab.model_spec import AttentionGroup, MoEShape
from freetoken.vocab.ops import OpShape
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Known, WarmupStep
from freetoken.vocab.weight import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

BatchPlan = object
"""A backend's own plan for one batch; opaque to the core, many may be alive at once."""

Pending = object
"""A MoE strategy's own handle between ``start`` and ``finish``."""

Packed = Any
"""Whatever a kernel's ``pack`` made; only that kernel looks inside."""

Bank = Mapping[str, "Tensor"]
"""Experts stacked for a kernel: part name → ``[S, *part shape]``."""


# ---------------------------------------------------------------------------------------------------- attention


@frozen
class AttentionLimits:
    """The largest step a backend will be asked for; sizes workspaces and graphs."""

    page_tokens: int
    max_seq_tokens: int
    max_running_requests: int
    max_prefill_tokens: int


@frozen
class AttentionSetup:
    """What a backend is made from: one group of like layers on one device."""

    group: AttentionGroup
    device: Device
    dtype: str
    limits: AttentionLimits
    options: object = None


class AttentionBackend(Protocol):
    """Attention over paged K and V for one group of layers. Prefill, extend and decode are one contract.

    A query at position ``p`` sees cached positions ``≤ p`` (and ``> p − window`` where the group has a window). The
    new tokens' K and V are in the pools before ``forward`` is called: the core's ``write_kv`` puts them there.
    """

    def plan(self, batch: Batch) -> BatchPlan:
        """Prepare one step. Reads host integers and tensors of ``batch``; the plan owns its state and stays valid
        until dropped, whatever is planned after it. May allocate; never called inside a graph."""
        ...

    def forward(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int, plan: BatchPlan) -> Tensor:
        """``q [T, Hq, D]``, pools ``[pages, P, Hkv, D]`` → ``[T, Hq, Dv]`` in q's dtype. No host synchronisation."""
        ...

    def reserve_graph(self, limits: AttentionLimits) -> None:
        """Allocate what captured plans share. Called once, before the first ``plan_capture``."""
        ...

    def plan_capture(self, batch: Batch) -> BatchPlan:
        """A plan whose ``forward`` may be captured: every address in it stays valid until ``release_graph``."""
        ...

    def plan_replay(self, plan: BatchPlan, batch: Batch) -> None:
        """Bring a captured plan up to date for a decode batch of the captured size; before each replay."""
        ...

    def release_graph(self) -> None:
        """Free what ``reserve_graph`` took; captured plans become invalid."""
        ...


# ---------------------------------------------------------------------------------------------------- kernels


@frozen
class BankPart:
    """One tensor of a packed expert: name, dtype by name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@frozen
class KernelSetup:
    """What a kernel is loaded for. ``dequantise`` is the formats' reference, for kernels that pack through it;
    ``options`` is an instance of ``KernelSpec.options``."""

    shape: OpShape
    device: Device
    dtype: str
    dequantise: Callable[[StoredTensor], Tensor]
    threads: int = 1
    options: object = None


@frozen
class LoadedKernel:
    """An op's implementation, ready to be called in the loop.

    ``pack`` turns the stored tensors of one weight (several are stacked along their rows) into what ``call`` takes; it
    must copy what it keeps. For ``experts`` it returns ``{part: tensor}`` matching ``KernelSpec.bank_layout``.
    """

    call: Callable[..., Any]
    pack: Callable[[Sequence[StoredTensor]], Packed] | None = None


class Ops(Protocol):
    """The op table: one bound callable per shape, chosen once at start."""

    def bind(self, shape: OpShape) -> Callable[..., Any]:
        """The kernel chosen for ``shape``; ``KeyError`` if the family did not declare it in ``op_shapes``."""
        ...


# ---------------------------------------------------------------------------------------------------- experts


@frozen
class ExpertLayer:
    """One layer's experts: how the chosen kernel lays a packed expert out, and its bound call.

    ``call(hidden [T, H], weights [T, K] f32, slots [T, K] i32, bank) -> [T, H]``; ``None`` at plan time.
    """

    layer: int
    layout: tuple[BankPart, ...]
    call: Callable[..., Tensor] | None = None


@frozen
class MoESetup:
    """What a strategy is budgeted and made from."""

    shape: MoEShape
    layers: tuple[ExpertLayer, ...]
    device: Device
    dtype: str
    max_tokens: int
    max_running_requests: int
    memory_bytes: int
    host_memory_bytes: int
    options: object = None
    max_seq_tokens: int = 0  # the longest request; 0: unknown
    notes: Path | None = None  # a file that the strategy may keep, read and replace: what it learns of this very model


@frozen
class MoEStats:
    """Counters since start. Bytes crossed by cause (``"prefill"``, ``"decode"``, ``"fill"``, ``"hint"``); stalls in ms;
    of the bytes that crossed on a hint, those that nobody wanted."""

    moved_bytes: Mapping[str, int]
    hits: int = 0
    misses: int = 0
    stall_ms: float = 0.0
    wasted_bytes: int = 0


class MoEStrategy(Protocol):
    """Owns where experts live *and* computes with them. Routing is the family's.

    Four attributes may be there: ``window_tokens`` (of a strategy whose spec says ``layer_major``), how much of a
    prompt passes a layer before the next one, in chunks, 0 for no windows; ``foresees``, asked once for each layer of a
    window: whether a hint would be acted on now; ``capturable``, whether decode steps can be captured now that the
    experts are in, ``True`` where it is missing; and ``close()``, called when the engine stops.
    """

    def accept(self, layer: int, expert: int, packed: Mapping[str, Tensor]) -> None:
        """Take one packed expert from the weight stream, in any order; copies what it keeps."""
        ...

    def seal(self) -> None:
        """All experts are in. Raises ``CheckpointError`` naming the first that is missing."""
        ...

    def begin_step(self, batch: Batch) -> None:
        """Before a step, outside any graph."""
        ...

    def end_step(self) -> None:
        """After a step, outside any graph; errors of helper threads surface here."""
        ...

    def start(self, layer: int, hidden: Tensor, weights: Tensor, experts: Tensor) -> Pending:
        """``hidden [T, H]``, ``weights [T, K] f32``, ``experts [T, K] i32``. Capturable. May overwrite ``experts``."""
        ...

    def finish(self, pending: Pending) -> Tensor:
        """The experts' weighted sum ``[T, H]`` in hidden's dtype. Capturable; several pendings may be open."""
        ...

    def hint(self, layer: int, experts: Tensor) -> None:
        """``experts [T, K]``, here or on the host, will likely be wanted at ``layer`` soon. May be ignored."""
        ...

    def rehearse(self) -> AbstractContextManager[None]:
        """Inside, the same kernels launch on the slots as they stand, results are garbage, nothing is fetched."""
        ...

    def stats(self) -> MoEStats: ...


# ---------------------------------------------------------------------------------------------------- model


@frozen(eq=False)
class Step:
    """One step's context, handed to every layer. ``caches[i]`` are layer ``i``'s pools: ``(k, v)`` or its states."""

    batch: Batch
    plans: Mapping[str, BatchPlan]
    caches: Sequence[tuple[Tensor, ...]]


class Layer(Protocol):
    """A layer may also offer ``begin(hidden, step)``: everything up to where experts are waited for, returning the call
    that gives ``[T, H]``. Several chunks of a prompt may be begun before the first is ended. And it may offer
    ``foresee(hidden)``, from the hidden states of a layer or two before: the layer's number and the experts ``[T, K]``
    that it would likely choose, or ``None`` where it has none."""

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        """``[T, H] → [T, H]``. Nothing else passes between layers; no host synchronisation."""
        ...


class Model(Protocol):
    """A sequence. The core's runner owns the order, so it may run layers one by one or layer-major."""

    @property
    def layers(self) -> Sequence[Layer]: ...

    def embed(self, batch: Batch) -> Tensor:
        """``[T, H]`` in the compute dtype."""
        ...

    def head(self, rows: Tensor) -> Tensor:
        """``[R, H] → [R, V]`` logits, float32; the final norm is in here."""
        ...


@frozen
class ModelParts:
    """What a family builds its layers from. ``weights`` holds packed parameters by slot name."""

    weights: Mapping[str, Packed]
    ops: Ops
    attention: Mapping[str, AttentionBackend]
    moe: MoEStrategy | None
    device: Device
    dtype: str


# ---------------------------------------------------------------------------------------------------- warmup


class WarmupPolicy(Protocol):
    """Decides what to warm. Pure: no device, no files, no clock."""

    def steps(self, plan: Plan, launch_space: LaunchSpace, known: Known) -> Iterable[WarmupStep]:
        """The steps, in the order they should run. The core's runner owns workers, manifest and scratch state."""
        ...
