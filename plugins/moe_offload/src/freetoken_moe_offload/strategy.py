"""The strategy ``offload``: all experts in host memory, those in use in slots on the device."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from attrs import define
from torch import Tensor

from freetoken.plugin.protocols import ExpertLayer, MoESetup, MoEStats, Pending
from freetoken.vocab.batch import Batch
from freetoken.vocab.errors import CheckpointError, EngineError
from freetoken_moe_offload import popularity
from freetoken_moe_offload.budget import decide
from freetoken_moe_offload.cache import DECODE, PREFILL, SlotCache
from freetoken_moe_offload.foresight import Trust, likely
from freetoken_moe_offload.host import Pinner
from freetoken_moe_offload.launches import passes
from freetoken_moe_offload.options import OffloadOptions

_log = logging.getLogger("freetoken.offload")

CAUSES = ("decode", "prefill")
NOTE_PERIOD_S = 300.0
"""How often the uses of experts are written down while serving, beside the end."""


@define(eq=False)
class _Open:
    """Between ``start`` and ``finish``: what is to be computed, or the result."""

    layer: int
    hidden: Tensor
    weights: Tensor
    slots: Tensor | None = None
    arrived: torch.cuda.Event | None = None
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
        self._known = popularity.read(setup.notes, tuple(self._layers), setup.shape.experts)
        _log.info("experts to start with: %s", self._known.because)
        self._caches = [
            SlotCache(group, slots, setup.device, options.policy,
                      popularity.first_experts(group, slots, self._known.shares))
            for group, slots in zip(sizes.groups, sizes.slots, strict=True)
        ]  # fmt: skip
        self._where = {layer: (cache, row) for cache in self._caches for row, layer in enumerate(cache.group.layers)}
        self._pinner = Pinner(torch.device(setup.device.torch_name)) if setup.device.kind == "cuda" else None
        self._accepted: dict[int, set[int]] = {layer: set() for layer in self._layers}
        self._filled_bytes = 0
        self._sealed = False
        self._unpinned: tuple[int, ...] = ()
        self._causes: list[int] = []  # of the steps begun and not ended: a window, and a decode between its layers
        self._open: list[_Open] = []
        self._trust = Trust()
        self._looks_ahead = options.foresee
        self._noted_uses = 0
        self._next_note = time.monotonic() + NOTE_PERIOD_S

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
        for cache in self._caches:
            cache.join_ahead()

    def end_step(self) -> None:
        """Back to the step around this one."""
        if self._causes.pop() == PREFILL:
            self._end_ahead()

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
            step.arrived = cache.arrived
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

    @property
    def foresees(self) -> bool:
        """Whether a hint would be acted on. Asked once for each layer of a window; in a rehearsal as if it were, so
        that what foreseeing launches is launched there too."""
        if any(cache.rehearsing for cache in self._caches):
            return self._looks_ahead
        return self._looks_ahead and any(cache.room_ahead for cache in self._caches) and self._trust.ask()

    def hint(self, layer: int, experts: Tensor) -> None:
        """Within a prompt: fetches ahead what it is all but sure to want at ``layer``, while another computes.

        Ignored in decode steps, where the link is never idle long enough for one expert (``docs/decisions``), and while
        several layers are open.
        """
        cache, row = self._where[layer]
        at_hand = {step.layer for step in self._open}
        if not self._causes or self._causes[-1] != PREFILL or not cache.room_ahead or len(at_hand | {layer}) > 2:
            return
        if layer in at_hand:
            return
        self._end_ahead()
        guarded = next((at for step in at_hand for where, at in (self._where[step],) if where is cache), -1)
        pairs = torch.bincount(experts.reshape(-1).cpu(), minlength=cache.group.experts).tolist()
        cache.bring_ahead(row, likely(pairs), guarded)

    def _end_ahead(self) -> None:
        """Learn from the last hint."""
        for cache in self._caches:
            found = cache.end_ahead()
            if found is not None:
                self._trust.learn(*found)

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
        """Bytes, hits and misses by what was looked up; waits for the device's counters. ``"hint"``: bytes that came
        before they were asked for, which then are hits."""
        moved = {"fill": self._filled_bytes, "decode": 0, "prefill": 0, "hint": 0}
        hits = misses = wasted = 0
        stall_ms = 0.0
        for cache in self._caches:
            counts = cache.counts()
            for cause in CAUSES:
                moved[cause] += counts[f"{cause}_misses"] * cache.group.expert_bytes
                hits += counts[f"{cause}_hits"]
                misses += counts[f"{cause}_misses"]
            stall_ms += cache.stall_ms
            moved["hint"] += cache.ahead_bytes[0]
            wasted += cache.ahead_bytes[1]
        if time.monotonic() >= self._next_note:
            self._note_uses()
        return MoEStats(moved, hits, misses, stall_ms, wasted)

    def close(self) -> None:
        """The engine stops: write down which experts were used, for the next start."""
        self._note_uses()

    def _note_uses(self) -> None:
        """Replace the file where there were decode steps since; a folder that cannot be written costs nothing now."""
        self._next_note = time.monotonic() + NOTE_PERIOD_S
        path = self._setup.notes
        counts = [cache.counts() for cache in self._caches]
        uses = sum(each["decode_hits"] + each["decode_misses"] for each in counts)
        if path is None or uses == self._noted_uses or not self._sealed:
            return
        self._noted_uses = uses
        now = {layer: each for cache in self._caches for layer, each in cache.uses().items()}
        try:
            popularity.write(path, popularity.blend(self._known.shares, now))
        except OSError as error:
            _log.warning("the uses of experts were not written down: %s", error)

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
        cache.wait(step.arrived)
        step.result = call(step.hidden, step.weights, step.slots, cache.bank)

    def _in_passes(self, step: _Open, cache: SlotCache, row: int, experts: Tensor, cause: int, count: int) -> Tensor:
        """More experts than slots: as many at a time as there are slots, others with weight 0, summed in float32."""
        call = self._layers[step.layer].call
        assert call is not None
        total = torch.zeros(step.hidden.shape, dtype=torch.float32, device=step.hidden.device)
        for number in range(count):
            slots = cache.bring(row, experts, cause, first=number * cache.slots, final=number == count - 1)
            cache.wait(cache.arrived)
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
