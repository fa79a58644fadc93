"""The strategy ``offload``: all experts in host memory, those in use in slots on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from attrs import define
from torch import Tensor

from freetoken.plugin.protocols import ExpertLayer, MoESetup, MoEStats, Pending
from freetoken.vocab.batch import Batch
from freetoken.vocab.errors import CheckpointError, EngineError
from freetoken_moe_offload.budget import decide
from freetoken_moe_offload.cache import DECODE, PREFILL, SlotCache
from freetoken_moe_offload.host import Pinner
from freetoken_moe_offload.launches import passes
from freetoken_moe_offload.options import OffloadOptions

CAUSES = ("decode", "prefill")


@define(eq=False)
class _Open:
    """Between ``start`` and ``finish``: what is to be computed, or the result."""

    layer: int
    hidden: Tensor
    weights: Tensor
    slots: Tensor | None = None
    result: Tensor | None = None


class OffloadExperts:
    """Implements ``plugin.protocols.MoEStrategy``.

    A decode step on a GPU looks up and fetches by kernels, so that it can be captured. Longer steps read the list of
    missing experts on the host and copy them with the copy engine. On a CPU the same code runs with host memory as the
    device. ``window_tokens``: how much of a prompt should pass a layer before the next; 0 for no more than a chunk.
    """

    def __init__(self, setup: MoESetup) -> None:
        sizes = decide(setup)
        options = setup.options if isinstance(setup.options, OffloadOptions) else OffloadOptions()
        self.window_tokens = sizes.window_tokens
        self._setup = setup
        self._layers: dict[int, ExpertLayer] = {layer.layer: layer for layer in setup.layers}
        self._caches = [
            SlotCache(group, slots, setup.device, options.policy)
            for group, slots in zip(sizes.groups, sizes.slots, strict=True)
        ]
        self._where = {layer: (cache, row) for cache in self._caches for row, layer in enumerate(cache.group.layers)}
        self._pinner = Pinner(torch.device(setup.device.torch_name)) if setup.device.kind == "cuda" else None
        self._accepted: dict[int, set[int]] = {layer: set() for layer in self._layers}
        self._filled_bytes = 0
        self._sealed = False
        self._unpinned: tuple[int, ...] = ()
        self._causes: list[int] = []  # of the steps begun and not ended: a window, and a decode between its layers
        self._open: list[_Open] = []

    # -------------------------------------------------------------------------------------------- loading

    def accept(self, layer: int, expert: int, packed: Mapping[str, Tensor]) -> None:
        """Copy one packed expert to the host, and into a slot while there are free ones for its layer.

        Raises ``EngineError`` for an expert that is unknown, came already, comes late, or is not laid out as declared.
        """
        self._check(layer, expert, packed)
        cache, row = self._where[layer]
        self._filled_bytes += cache.put(row, expert, packed)
        self._accepted[layer].add(expert)
        if self._pinner is not None and len(self._accepted[layer]) == self._setup.shape.experts:
            self._pinner.add(cache.hosts[row])

    def seal(self) -> None:
        """Raises ``CheckpointError`` naming the first (layer, expert) that never came. Waits until all is pinned."""
        for layer in sorted(self._layers):
            for expert in range(self._setup.shape.experts):
                if expert not in self._accepted[layer]:
                    total = len(self._layers) * self._setup.shape.experts
                    here = sum(len(found) for found in self._accepted.values())
                    raise CheckpointError(
                        f"expert {expert} of layer {layer}", f"it never came: {here} of {total} experts are in",
                        "the checkpoint may be incomplete; download it again",
                    )  # fmt: skip
        for cache in self._caches:
            cache.seal()
        if self._pinner is not None:
            self._unpinned = self._pinner.finish()
            self._pinner = None
        self._sealed = True

    @property
    def capturable(self) -> bool:
        """Whether decode steps can be captured: not where memory could not be pinned."""
        return all(cache.capturable(row) for cache, row in self._where.values())

    # -------------------------------------------------------------------------------------------- steps

    def begin_step(self, batch: Batch) -> None:
        """A step of single tokens is a decode step. Steps may nest: a decode step between two layers of a window."""
        self._causes.append(DECODE if batch.max_query_tokens == 1 else PREFILL)
        self._open.clear()

    def end_step(self) -> None:
        """Back to the step around this one."""
        self._causes.pop()

    def start(self, layer: int, hidden: Tensor, weights: Tensor, experts: Tensor) -> Pending:
        """Looks up, and starts fetching. ``finish`` computes, except where the step takes several passes."""
        if self._layers[layer].call is None:
            raise EngineError(f"experts of layer {layer}", "the strategy was made without the kernel's bound call")
        cache, row = self._where[layer]
        self._settle_others(layer, cache)
        cause = self._causes[-1] if self._causes else DECODE
        step = _Open(layer, hidden, weights)
        count = passes(experts.numel(), cache.group.experts, cache.slots)
        if count > 1:
            step.result = self._in_passes(step, cache, row, experts, cause, count)
        else:
            step.slots = cache.bring(row, experts, cause)
            self._open.append(step)
        return step

    def finish(self, pending: Pending) -> Tensor:
        """``[T, H]`` in hidden's dtype."""
        step = cast("_Open", pending)
        if step.result is None:
            self._compute(step)
        if step in self._open:
            self._open.remove(step)
        assert step.result is not None
        return step.result

    def hint(self, layer: int, experts: Tensor) -> None:
        """Fetches ahead, outside a rehearsal and while no other experts are waiting to be computed."""
        cache, row = self._where[layer]
        if self._open or cache.rehearsing or passes(experts.numel(), cache.group.experts, cache.slots) > 1:
            return
        cache.wait()
        cache.bring(row, experts, self._causes[-1] if self._causes else DECODE)

    @contextmanager
    def rehearse(self) -> Iterator[None]:
        """Look-ups go to an index in which every expert is somewhere: the kernels launch and nothing is fetched.

        A capture inside still captures the real index, since it launches nothing.
        """
        before = [cache.rehearsing for cache in self._caches]
        for cache in self._caches:
            cache.rehearsing = True
        try:
            yield
        finally:
            for cache, was in zip(self._caches, before, strict=True):
                cache.rehearsing = was

    def stats(self) -> MoEStats:
        """Bytes, hits and misses by what was looked up; waits for the device's counters."""
        moved = {"fill": self._filled_bytes, "decode": 0, "prefill": 0}
        hits = misses = 0
        stall_ms = 0.0
        for cache in self._caches:
            counts = cache.counts()
            for cause in CAUSES:
                moved[cause] += counts[f"{cause}_misses"] * cache.group.expert_bytes
                hits += counts[f"{cause}_hits"]
                misses += counts[f"{cause}_misses"]
            stall_ms += cache.stall_ms
        return MoEStats(moved, hits, misses, stall_ms)

    # -------------------------------------------------------------------------------------------- the parts

    def _settle_others(self, layer: int, cache: SlotCache) -> None:
        """Compute what is open and might lose its slots to this look-up.

        Chunks of one layer may stay open together where all its experts have room: prefill never takes a slot of the
        layer at hand while there are others.
        """
        stays = bool(self._causes) and self._causes[-1] == PREFILL and cache.slots >= cache.group.experts
        for step in self._open:
            if step.layer != layer or not stays:
                self._compute(step)
        self._open = [step for step in self._open if step.result is None]

    def _compute(self, step: _Open) -> None:
        cache, _ = self._where[step.layer]
        call = self._layers[step.layer].call
        assert call is not None
        cache.wait()
        step.result = call(step.hidden, step.weights, step.slots, cache.bank)

    def _in_passes(self, step: _Open, cache: SlotCache, row: int, experts: Tensor, cause: int, count: int) -> Tensor:
        """More experts than slots: as many at a time as there are slots, others with weight 0, summed in float32."""
        call = self._layers[step.layer].call
        assert call is not None
        total = torch.zeros(step.hidden.shape, dtype=torch.float32, device=step.hidden.device)
        for number in range(count):
            slots = cache.bring(row, experts, cause, first=number * cache.slots, final=number == count - 1)
            cache.wait()
            weights = torch.where(slots >= 0, step.weights, 0.0)
            total += call(step.hidden, weights, slots.clamp(min=0), cache.bank).float()
        return total.to(step.hidden.dtype)

    def _check(self, layer: int, expert: int, packed: Mapping[str, Tensor]) -> None:
        asked, count = f"expert {expert} of layer {layer}", self._setup.shape.experts
        known = self._layers.get(layer)
        if known is None or not 0 <= expert < count:
            raise EngineError(asked, f"there are {count} experts in each of the layers {sorted(self._layers)}")
        if self._sealed:
            raise EngineError(asked, "it came after the experts were sealed")
        if expert in self._accepted[layer]:
            raise EngineError(asked, "it came twice", "two tensors of the checkpoint map to one expert")
        wanted = {part.name: (part.dtype, part.shape) for part in known.layout}
        got = {name: (str(part.dtype).removeprefix("torch."), tuple(part.shape)) for name, part in packed.items()}
        if got != wanted:
            raise EngineError(asked, f"its kernel declared {wanted} but packed {got}")
