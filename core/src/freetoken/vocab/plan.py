"""What was decided and why: names, sizes and reasons. Picklable, printable, and needs nothing above it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from attrs import evolve, field, frozen

from freetoken.vocab.errors import Refusal
from freetoken.vocab.hardware import Device, Hardware
from freetoken.vocab.launch import Range, StepSpace
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.model_spec import ModelSpec
from freetoken.vocab.ops import OpShape
from freetoken.vocab.units import ceil_div

T = TypeVar("T")

__all__ = ["CandidateNote", "Choice", "Decision", "KernelChoice", "OptionValue", "Plan", "Refusal", "Sizing"]


@frozen
class Decision(Generic[T]):
    """A decided value and the reason for it."""

    name: str
    value: T
    because: str


@frozen
class CandidateNote:
    """One candidate of a choice: whether it fits, and why it was or was not taken."""

    name: str
    fits: bool
    why: str


@frozen
class Choice:
    """A plugin offer that was picked, with every candidate and what became of it."""

    kind: str  # "attention backend", "MoE strategy", "kernel", "warmup policy", …
    subject: str  # what it is for: a group of layers, an op; "" when there is only one
    name: str
    because: str
    candidates: tuple[CandidateNote, ...] = ()


@frozen
class KernelChoice:
    """The kernel that serves one op at one shape."""

    shape: OpShape
    choice: Choice


@frozen
class OptionValue:
    """An option's value as plain data, with where it came from (``flag --x``, ``FREETOKEN_X``, file, ``default``)."""

    owner: str
    name: str
    value: object
    origin: str


@frozen
class Plan:
    """Everything a worker needs to build the engine, by name.

    ``attention`` and ``kernels`` hold one choice a group and one a shape. ``claims`` are what each part declared it
    will take. Token counts are per sequence unless the name says otherwise.
    """

    model: ModelSpec
    model_path: str
    served_name: str
    hardware: Hardware
    device: Device
    dtype: str
    attention: tuple[Choice, ...]
    moe: Choice
    kernels: tuple[KernelChoice, ...]
    warmup: Choice
    page_tokens: int
    max_seq_tokens: int
    max_running_requests: int
    max_prefill_tokens: int
    kv_tokens: int
    state_slots: int
    snapshot_bytes: int
    memory_bytes: int
    claims: tuple[MemoryClaim, ...]
    decisions: tuple[Decision[Any], ...]
    options: tuple[OptionValue, ...]
    weight_formats: Mapping[str, str] = field(factory=dict)  # slot name → format, for slots that are not plain

    @property
    def step_space(self) -> StepSpace:
        """Every step this plan's engine can take."""
        tokens = self.max_prefill_tokens
        running = self.max_running_requests
        return StepSpace(
            tokens=Range(1, max(tokens, running)),
            sequences=Range(1, running),
            chunk=Range(1, min(tokens, self.max_seq_tokens)),
            prefix=Range(0, self.max_seq_tokens - 1),
            context=Range(1, self.max_seq_tokens),
            decode_sequences=Range(1, running),
        )


@frozen
class Sizing:
    """The second decision, after the weights are in and the peak is measured. It may only shrink what was planned."""

    kv_pages: int
    page_tokens: int
    max_prefill_tokens: int
    max_running_requests: int
    state_slots: int
    because: tuple[str, ...] = ()
    snapshot_slots: int = 0  # rows for snapshots of recurrent state

    @property
    def kv_tokens(self) -> int:
        return self.kv_pages * self.page_tokens

    @classmethod
    def of(cls, plan: Plan) -> Sizing:
        """The sizing that gives a plan all it declared."""
        slot_bytes = plan.model.state_slot_bytes
        return cls(
            kv_pages=ceil_div(plan.kv_tokens, plan.page_tokens),
            page_tokens=plan.page_tokens,
            max_prefill_tokens=plan.max_prefill_tokens,
            max_running_requests=plan.max_running_requests,
            state_slots=plan.state_slots,
            because=("as planned",),
            snapshot_slots=plan.snapshot_bytes // slot_bytes if slot_bytes else 0,
        )

    def shrunk(self, because: str, **changes: int) -> Sizing:
        """A smaller sizing with one more reason. Raises ``ValueError`` when a change would grow anything."""
        for name, value in changes.items():
            if value > getattr(self, name):
                raise ValueError(f"a sizing may only shrink: {name} {getattr(self, name)} → {value}")
        return evolve(self, because=(*self.because, because), **changes)  # type: ignore[arg-type]
