"""What plugins offer: frozen specs of facts, a probe and a factory. A spec imports neither torch nor a library.

Every spec has a ``name`` (the user's word for it), a one-line ``summary`` and a ``priority`` (for ``auto``: the highest
that fits wins, ties by name). New fields get defaults, so that older plugins keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from freetoken.plugin.protocols import (
    AttentionBackend,
    AttentionSetup,
    BankPart,
    KernelSetup,
    LoadedKernel,
    Model,
    ModelParts,
    MoESetup,
    MoEStrategy,
    WarmupPolicy,
)
from freetoken.vocab.availability import Availability
from freetoken.vocab.chat import ChatFormat
from freetoken.vocab.hardware import Hardware
from freetoken.vocab.launch import Launches
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.model_spec import AttentionGroup, ModelSpec
from freetoken.vocab.ops import OpShape
from freetoken.vocab.weight import CheckpointIndex, Source, StoredTensor, WeightSlot

if TYPE_CHECKING:
    from torch import Tensor

Probe = Callable[[Hardware], Availability]
_PLAIN_CHAT = ChatFormat()


def available(_: Hardware) -> Availability:
    """The probe of a thing that runs anywhere."""
    return Availability.yes()


@frozen(kw_only=True)
class AttentionBackendSpec:
    """A paged attention backend and what it serves.

    ``head_dims`` and ``page_tokens`` empty mean "any". ``deep_probe`` is ``"module:function"``, called with the
    hardware in a child process (it may import the library); ``probe`` is cheap. ``workspace`` declares memory,
    ``launches`` the launch space. ``ranking`` says in a few words what the priority rests on.
    """

    name: str
    summary: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    create: Callable[[AttentionSetup], AttentionBackend]
    priority: int = 0
    ranking: str = ""
    head_dims: frozenset[int] = frozenset()
    page_tokens: tuple[int, ...] = ()
    windows: bool = False
    graphs: bool = False
    probe: Probe = available
    deep_probe: str = ""
    workspace: Callable[[AttentionSetup], tuple[MemoryClaim, ...]] = lambda _: ()
    launches: Launches | None = None
    options: type | None = None

    def serves(self, group: AttentionGroup, dtype: str) -> Availability:
        """Whether the declared facts cover ``group`` computed in ``dtype``."""
        if dtype not in self.dtypes:
            return Availability.no(f"{self.name} computes in {_listed(self.dtypes)}, not {dtype}")
        if self.head_dims and group.head_dim not in self.head_dims:
            return Availability.no(f"{self.name} serves head sizes {_listed(self.head_dims)}, not {group.head_dim}")
        if group.cache.window is not None and not self.windows:
            return Availability.no(f"{self.name} has no sliding window")
        return Availability.yes()


@frozen(kw_only=True)
class MoEStrategySpec:
    """Where experts live and how they are computed. ``budget`` is pure; it sees layouts, not tensors.

    ``launches(setup)`` is the launch space of what the strategy itself starts for one layer beside the experts' kernel.
    """

    name: str
    summary: str
    devices: frozenset[str]
    budget: Callable[[MoESetup], tuple[MemoryClaim, ...]]
    create: Callable[[MoESetup], MoEStrategy]
    priority: int = 0
    graphs: bool = False
    layer_major: bool = False  # long prompts run all chunks through a layer before the next layer
    probe: Probe = available
    deep_probe: str = ""
    launches: Callable[[MoESetup], Launches] | None = None
    options: type | None = None


@frozen(kw_only=True)
class KernelSpec:
    """An implementation of one op.

    ``formats`` are the weight formats it takes, ``"*"`` any (through the reference dequantisation). Kernels with equal,
    non-empty ``packing`` share one packed copy of a matrix (tied embeddings). ``accepts`` may refuse a shape.
    ``packed_bytes(shape)`` is what one packed matrix (or one expert) takes.
    """

    op: str
    name: str
    summary: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    load: Callable[[KernelSetup], LoadedKernel]
    priority: int = 0
    formats: frozenset[str] = frozenset()
    packing: str = ""
    accepts: Callable[[OpShape], Availability] = lambda _: Availability.yes()
    probe: Probe = available
    deep_probe: str = ""
    packed_bytes: Callable[[OpShape], int] = lambda _: 0
    bank_layout: Callable[[OpShape], tuple[BankPart, ...]] | None = None
    launches: Launches | None = None
    options: type | None = None

    def serves(self, shape: OpShape) -> Availability:
        """Whether the declared facts cover ``shape``."""
        if shape.dtype not in self.dtypes:
            return Availability.no(f"{self.name} computes in {_listed(self.dtypes)}, not {shape.dtype}")
        missing = [f for f in shape.formats if f not in self.formats and "*" not in self.formats]
        if missing:
            return Availability.no(f"{self.name} takes {_listed(self.formats)}, not {_listed(missing)}")
        return self.accepts(shape)


@frozen(kw_only=True)
class WarmupPolicySpec:
    """A warmup policy; ``create`` gets an instance of ``options`` (or ``None``)."""

    name: str
    summary: str
    create: Callable[[object], WarmupPolicy]
    priority: int = 0
    options: type | None = None


def _shape_of_first_part(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return next(iter(shapes.values()))


@frozen(kw_only=True)
class PartShapes:
    """The parts of one format in a safetensors checkpoint: part name → suffix after the logical tensor's name.

    ``logical_shape`` gets the stored shape of every part; the default takes the first part's as it is.
    """

    suffixes: Mapping[str, str]
    logical_shape: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, ...]] = _shape_of_first_part


_ONE_PART = PartShapes(suffixes={"data": ""})


class WeightCodec(Protocol):
    """A format's arithmetic on tensors; made by ``WeightFormatSpec.codec``, which imports torch."""

    def dequantise(self, tensor: StoredTensor) -> Tensor:
        """The logical tensor in float32: the reference that every kernel for this format is tested against."""
        ...

    def take(self, tensor: StoredTensor, source: Source) -> StoredTensor:
        """The piece that ``source`` names, still in this format, without dequantising."""
        ...


@frozen(kw_only=True)
class WeightFormatSpec:
    """A weight format: how it is detected, its parts, and its reference dequantisation.

    ``ggml_type`` is the number GGUF files use. ``safetensors_dtype`` is the dtype string of a plain format.
    ``detect`` recognises a Hugging Face ``quantization_config``; its tensors' parts then lie under ``parts.suffixes``.
    ``num_bytes(shape)`` is the size of a tensor as stored. ``block`` is the number of weights along the last axis that
    share scales: that axis must be a multiple of it.
    """

    name: str
    summary: str
    num_bytes: Callable[[tuple[int, ...]], int]
    codec: Callable[[], WeightCodec]
    priority: int = 0
    block: int = 1
    ggml_type: int | None = None
    safetensors_dtype: str = ""
    detect: Callable[[Mapping[str, object]], bool] | None = None
    parts: PartShapes = _ONE_PART


@frozen(kw_only=True)
class ModelFamilySpec:
    """A model family in one object.

    ``read_config`` gets the checkpoint's ``config.json`` (or the same keys made from GGUF metadata), reads it with
    types and raises ``CheckpointError`` for values it does not implement. ``weights`` lists the slots for the layout at
    hand. ``op_shapes`` lists, part by part (``"embed"``, ``"layers.0"``, …, ``"head"``), the ops the built model will
    bind; the planner fills in weight formats. ``tiny`` gives a small configuration that the conformance suite builds.
    """

    name: str
    summary: str
    architectures: tuple[str, ...]
    read_config: Callable[[Mapping[str, object], str], ModelSpec]  # (config, compute dtype)
    weights: Callable[[ModelSpec, CheckpointIndex], tuple[WeightSlot, ...]]
    op_shapes: Callable[[ModelSpec, str], tuple[tuple[str, tuple[OpShape, ...]], ...]]
    build: Callable[[ModelSpec, ModelParts], Model]
    tiny: Callable[[], Mapping[str, object]]
    priority: int = 0
    gguf_architectures: tuple[str, ...] = ()
    chat: ChatFormat = _PLAIN_CHAT
    ignored_tensors: Sequence[str] = ()  # regular expressions of stored tensors that are not parameters


@frozen(kw_only=True)
class OptionsSpec:
    """One owner's options: a frozen attrs class whose fields are made with ``freetoken.option``.

    ``owner`` is the word in flags (``--<owner>-<field>``), variables and the file's section. An empty ``prefix`` gives
    flags without the owner's name; the core alone uses it.
    """

    owner: str
    cls: type
    summary: str = ""


@frozen
class Candidate:
    """A candidate that already fits, as ``freetoken_choose`` sees it; candidates come ranked."""

    name: str
    priority: int
    summary: str


Spec = (
    AttentionBackendSpec
    | MoEStrategySpec
    | KernelSpec
    | WarmupPolicySpec
    | ModelFamilySpec
    | WeightFormatSpec
    | OptionsSpec
)


def _listed(names: object) -> str:
    return ", ".join(str(n) for n in sorted(names)) or "nothing"  # type: ignore[call-overload]
