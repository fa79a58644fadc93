"""The real model step without a GPU: engine, model, kernels and attention on meta tensors, every launch recorded.

The oracle for a planned model's launch space. Everything between a ``StepPlan`` and its launches is the code that
serves: batch builder, runner, family, op table, attention backend, expert strategy, sampler. Only memory is missing: a
meta tensor has a dtype, strides and an offset, which is all that a launch's key depends on. Columns of a step's integer
buffer lie at the offsets they have in the GPU's staging buffer, so alignment is that of a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from attrs import field, frozen
from torch import Tensor

from freetoken.builtin import BUILTINS
from freetoken.config.engine_options import CoreOptions
from freetoken.kv.pool import CachePools
from freetoken.ops.table import OpTable
from freetoken.ops.triton_stub import RecordedLaunch, Target, record_launches
from freetoken.plugin.manager import Plugins, build_plugins
from freetoken.plugin.protocols import Layer, Model, ModelParts, Step
from freetoken.plugin.selection import Selection
from freetoken.run.batch_builder import BatchBuilder
from freetoken.run.create import create_attention, create_moe
from freetoken.run.engine import Engine
from freetoken.run.loader import WeightPacker, load_kernels
from freetoken.run.runner import ModelRunner
from freetoken.run.sampler import Sampler
from freetoken.run.staging import _RING, Staging
from freetoken.run.step_plan import SamplingRow, StepPlan, StepRow
from freetoken.testing.plans import launch_space_of, planned
from freetoken.vocab.batch import Batch
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.sampling import SamplingParams
from freetoken.vocab.units import GIB, ceil_div
from freetoken.vocab.weight import StoredTensor, WeightSlot
from freetoken.warmup.launch_space import DeclaredLaunchSpace
from freetoken.weights.slots import EXPERT_PROJECTIONS, slot_shapes

FAST = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=0)
FULL = SamplingParams(
    temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=0, min_tokens=1, presence_penalty=0.1, frequency_penalty=0.1,
    repetition_penalty=1.1, logit_bias=((0, 1.0),), logprobs=3,
)  # fmt: skip
"""Everything that the full route can be asked for."""

Made = tuple[str, tuple[int, ...]]
"""One launch: its key and its grid."""


@frozen
class MetaDevice(Device):
    """A card's facts, with tensors that have no memory."""

    @property
    def torch_name(self) -> str:
        return "meta"


@frozen
class Share:
    """One sequence's share of a step: new tokens after ``prefix`` cached ones; ``params`` is ``None`` for a chunk that
    does not end its prompt."""

    tokens: int
    prefix: int = 0
    params: SamplingParams | None = FAST


@frozen(eq=False)
class _Marks:
    """Where in the list of recorded launches each part of the model begins."""

    records: list[RecordedLaunch]
    starts: list[tuple[str, int]] = field(factory=list)

    def enter(self, part: str) -> None:
        self.starts.append((part, len(self.records)))

    def parts(self) -> Iterator[tuple[str, list[RecordedLaunch]]]:
        ends = [start for _, start in self.starts[1:]] + [len(self.records)]
        for (part, start), end in zip(self.starts, ends, strict=True):
            yield part, self.records[start:end]


class _MarkedLayer:
    """A layer that says when it begins."""

    def __init__(self, layer: Layer, part: str, tell: Callable[[str], None]) -> None:
        self._layer, self._part, self._tell = layer, part, tell

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        self._tell(self._part)
        return self._layer.forward(hidden, step)


class _MarkedModel:
    """A model that says which part begins; the sampler's launches follow the head's."""

    def __init__(self, model: Model, tell: Callable[[str], None]) -> None:
        self._model, self._tell = model, tell
        self._layers = [_MarkedLayer(x, f"layers.{i}", tell) for i, x in enumerate(model.layers)]

    @property
    def layers(self) -> Sequence[Layer]:
        return self._layers

    def embed(self, batch: Batch) -> Tensor:
        self._tell("embed")
        return self._model.embed(batch)

    def head(self, rows: Tensor) -> Tensor:
        self._tell("head")
        return self._model.head(rows)


class LaunchTrace:
    """A model of ``config`` on ``device``, with the kernels, backends and strategies that are installed.

    ``space`` is what warmup sees; ``check`` runs one step and compares.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        device: Device,
        *,
        options: CoreOptions | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        loaded = plugins if plugins is not None else build_plugins(Selection(), BUILTINS)
        card = card_of(device)
        resolved = planned(config, card, plugins=loaded, options=options)
        self.plan = plan = resolved.plan
        self.target = Target.of(device)
        self.space: DeclaredLaunchSpace = launch_space_of(resolved, loaded)
        kernels = load_kernels(resolved.kernels, card, plan.dtype, lambda t: t.parts["data"], 1, _defaults)
        attention = create_attention(plan, loaded.catalogs, _defaults)
        moe = create_moe(resolved, loaded.catalogs, kernels, _defaults)
        packer = WeightPacker(
            shapes=resolved.needs.shapes, specs=resolved.kernels, loaded=kernels,
            dequantise=lambda t: t.parts["data"], device=torch.device("meta"), dtype=getattr(torch, plan.dtype),
            moe=moe,
        )  # fmt: skip
        for slot in resolved.needs.slots:
            packer.deliver(slot, _weights(slot, plan.dtype))
        parts = ModelParts(packer.finish(), OpTable(kernels), attention, moe, card, plan.dtype)
        model = _MarkedModel(resolved.family.build(plan.model, parts), self._tell)
        rows = plan.max_running_requests + 1 if plan.model.state_slot_bytes else 0
        pages = ceil_div(plan.kv_tokens, plan.page_tokens)
        pools = CachePools(plan.model.caches, pages, plan.page_tokens, max(rows, 2), "meta")
        self.sample = next(kernels[shape].call for shape in kernels if shape.op == "sample")
        self.runner = ModelRunner(cast(Model, model), attention, moe, pools)
        self._marks = _Marks([])
        self._pages = list(range(1, ceil_div(plan.max_seq_tokens, plan.page_tokens) + 1))
        sampler = Sampler(plan.model.vocab_size, "meta", self.sample)
        self.engine = Engine(self.runner, self._builder(), sampler, plan.max_running_requests, "meta")
        self._sampler = sampler

    def _tell(self, part: str) -> None:
        self._marks.enter(part)

    def _builder(self) -> BatchBuilder:
        """The real one, its columns staged in one buffer as on a GPU."""
        plan = self.plan
        tokens, running = plan.step_space.tokens.high, plan.max_running_requests
        builder = BatchBuilder(torch.device("cpu"), running, plan.max_seq_tokens, tokens, plan.page_tokens)
        builder._staging = _meta_staging()
        return builder

    # ------------------------------------------------------------------------------------------------ one step

    def step_plan(self, sequences: Sequence[Share]) -> StepPlan:
        """The step as the scheduler would hand it over."""
        rows = []
        for lane, s in enumerate(sequences):
            sample = None if s.params is None else SamplingRow(f"r{lane}", s.params, 0, 0, frozenset({0}))
            pending = s.tokens == 1 and s.prefix > 0
            tokens = cast("Sequence[int]", torch.zeros(s.tokens, dtype=torch.int64).numpy())
            rows.append(
                StepRow(f"r{lane}", lane, tokens, s.prefix, self._pages, state_slot=0, pending=pending, sample=sample)
            )
        return StepPlan(tuple(rows))

    def point(self, sequences: Sequence[Share]) -> StepPoint:
        """The step's place in the step space."""
        routes = {s.params.route for s in sequences if s.params is not None}
        return StepPoint(
            tokens=sum(s.tokens for s in sequences),
            sequences=len(sequences),
            max_query=max(s.tokens for s in sequences),
            max_context=max(s.tokens + s.prefix for s in sequences),
            rows=sum(s.params is not None for s in sequences),
            decode=all(s.tokens == 1 and s.prefix for s in sequences),
            sampler_route="full" if "full" in routes else "fast",
        )

    def record(self, sequences: Sequence[Share]) -> dict[str, frozenset[Made]]:
        """Run one step through the engine: every part's launches."""
        plan = self.step_plan(sequences)
        rows = plan.sampled
        with record_launches(self.target) as records:
            self._marks = _Marks(records)
            for row in rows:
                assert row.sample is not None
                self._sampler.add(row.request_id, row.sample.params, prompt=(0,))
            try:
                self.engine.launch(plan)
            finally:
                for row in rows:
                    self._sampler.forget(row.request_id)
        return self._parts()

    def record_body(self, run: Callable[[], object]) -> dict[str, frozenset[Made]]:
        """The same for anything else that runs this model, such as the capture of a decode step."""
        with record_launches(self.target) as records:
            self._marks = _Marks(records)
            run()
        return self._parts()

    def _parts(self) -> dict[str, frozenset[Made]]:
        made: dict[str, frozenset[Made]] = {}
        for part, found in self._marks.parts():
            made[part] = made.get(part, frozenset()) | {(r.key, r.grid) for r in found}
        return made

    # ------------------------------------------------------------------------------------------------ the comparison

    def declared(self, part: str, point: StepPoint) -> frozenset[Made]:
        """What the launch space says of one part at ``point``."""
        return frozenset(
            (key, getattr(launch, "grid", ())) for op in self.space.ops(part) for key, launch in op.keyed(point)
        )

    def check(self, sequences: Sequence[Share]) -> frozenset[str]:
        """Run the step and compare part by part, keys and grids; returns the keys. Raises ``AssertionError``."""
        return self.compare(self.record(sequences), self.point(sequences))

    def compare(self, recorded: Mapping[str, frozenset[Made]], point: StepPoint) -> frozenset[str]:
        """Every part launched exactly what it declares at ``point``."""
        keys: set[str] = set()
        for part, made in recorded.items():
            want = self.declared(part, point)
            assert made == want, f"{part} at {point}: launched {sorted(made - want)}, declared {sorted(want - made)}"
            keys.update(key for key, _ in made)
        return frozenset(keys)


def card_of(device: Device) -> MetaDevice:
    """The same facts; a device that says nothing of its memory gets plenty."""
    return MetaDevice(
        device.kind, device.index, device.name, device.compute_capability, device.multiprocessors,
        device.shared_memory_bytes, device.memory_total_bytes or 150 * GIB, device.memory_free_bytes or 148 * GIB,
    )  # fmt: skip


def _meta_staging() -> Staging:
    """One that lays columns out in a single buffer, whose copy goes nowhere."""
    staging = Staging(torch.device("cpu"), 0)
    staging._device = torch.device("meta")
    staging._hosts = [torch.empty(1 << 24, dtype=torch.uint8)] * _RING
    return staging


def _weights(slot: WeightSlot, dtype: str) -> tuple[StoredTensor, ...]:
    """A slot's tensors as a plain checkpoint in ``dtype`` would bring them."""
    parts = EXPERT_PROJECTIONS if slot.kind == "experts" else ("",)
    return tuple(
        StoredTensor(
            f"{slot.name}.{part}", dtype, shape,
            {"data": torch.empty(shape, dtype=getattr(torch, dtype), device="meta")}, "meta",
        )
        for part, shape in zip(parts, slot_shapes(slot), strict=True)
    )  # fmt: skip


def _defaults(cls: type | None) -> object:
    return None if cls is None else cls()
