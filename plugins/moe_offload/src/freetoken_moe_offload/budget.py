"""How many experts the device gets, and what that takes: pure arithmetic with reasons.

Layers whose experts are laid out alike form a *group* and share one bank of slots. The least that works is ``top_k``
slots a group, so that one token finds all its experts: a step that routes to more experts than there are slots is
computed in passes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from attrs import frozen

from freetoken.plugin.protocols import BankPart, MoESetup
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.units import ceil_div, format_bytes
from freetoken_moe_offload.options import OffloadOptions

NAME = "offload"
PAGE_BYTES = 4096
ALIGN_BYTES = 512  # what an allocator of device memory rounds up to
WINDOW_TENSORS = 3  # of each token of a window: the stream, the normed input and the sum that waits for the experts


@frozen
class Group:
    """Layers of equal layout, by their number in the model."""

    layout: tuple[BankPart, ...]
    layers: tuple[int, ...]
    experts: int

    @property
    def expert_bytes(self) -> int:
        return sum(part_bytes(part) for part in self.layout)

    @property
    def all_experts(self) -> int:
        return len(self.layers) * self.experts

    @property
    def host_bytes(self) -> int:
        """The banks of all layers; each part of a layer starts on a page of its own."""
        parts = (ceil_div(part_bytes(part) * self.experts, PAGE_BYTES) * PAGE_BYTES for part in self.layout)
        return sum(parts) * len(self.layers)


@frozen
class OffloadSizes:
    """The decision: slots of each group, the window, and their bytes."""

    groups: tuple[Group, ...]
    slots: tuple[int, ...]
    window_tokens: int
    device_bytes: int
    window_bytes: int
    host_bytes: int
    because: str


def part_bytes(part: BankPart) -> int:
    """Bytes of one expert's part."""
    return prod(part.shape) * itemsize_bytes(part.dtype)


def group_layers(setup: MoESetup) -> tuple[Group, ...]:
    """The groups, in the order of their first layers."""
    groups: dict[tuple[BankPart, ...], list[int]] = {}
    for layer in setup.layers:
        groups.setdefault(layer.layout, []).append(layer.layer)
    return tuple(Group(layout, tuple(layers), setup.shape.experts) for layout, layers in groups.items())


def index_bytes(group: Group, slots: int) -> int:
    """The index arrays of a group and their copy for rehearsals; see ``index.IndexState``."""
    table = group.all_experts
    sizes = (slots * 4, table * 4, table * 8, table * 4, group.experts * 4, group.experts * 4, group.experts * 4,
             list_room(group.experts, slots) * 8 + 16, 8, 64)  # fmt: skip
    return 2 * sum(ceil_div(size, ALIGN_BYTES) * ALIGN_BYTES for size in sizes)


def list_room(experts: int, slots: int) -> int:
    """Places in the list of experts to fetch, padded to whole 16 bytes."""
    return ceil_div(min(experts, slots), 4) * 4


def decide(setup: MoESetup) -> OffloadSizes:
    """The sizes for ``setup``. Raises ``RefusedPlan`` when they do not fit, with the numbers and the way out."""
    options = setup.options if isinstance(setup.options, OffloadOptions) else OffloadOptions()
    _refuse_two_sizes(options)
    groups = group_layers(setup)
    window_tokens, window_bytes = _window(setup, options)
    host_bytes = sum(group.host_bytes for group in groups)
    if host_bytes > setup.host_memory_bytes:
        raise RefusedPlan(
            f"--moe-strategy {NAME}",
            f"the experts take {format_bytes(host_bytes)} of host memory, {format_bytes(setup.host_memory_bytes)} are"
            " free",
            "free host memory, or use a quantised checkpoint; --host-memory-bytes corrects a wrong reading",
        )
    room = setup.memory_bytes
    if setup.device.kind == "cpu":  # both places are one memory there
        room = min(room, setup.host_memory_bytes - host_bytes)
    total, why = _decide_total(groups, setup, options, room, window_bytes)
    slots = spread(groups, total, setup.shape.top_k)
    return OffloadSizes(groups, slots, window_tokens, device_bytes(groups, slots), window_bytes, host_bytes, why)


def budget(setup: MoESetup) -> tuple[MemoryClaim, ...]:
    """What ``decide`` comes to, as claims."""
    sizes = decide(setup)
    every = sum(group.all_experts for group in sizes.groups)
    what = f"slots for {sum(sizes.slots)} of {every} experts ({sizes.because})"
    return (
        MemoryClaim(NAME, what, sizes.device_bytes, sizes.device_bytes + sizes.window_bytes),
        MemoryClaim(NAME, "all experts in host memory", sizes.host_bytes, sizes.host_bytes, where="host"),
    )


def device_bytes(groups: tuple[Group, ...], slots: tuple[int, ...]) -> int:
    """Bytes of the slots and of the index that goes with them."""
    total = 0
    for group, count in zip(groups, slots, strict=True):
        total += sum(ceil_div(part_bytes(part) * count, ALIGN_BYTES) * ALIGN_BYTES for part in group.layout)
        total += index_bytes(group, count)
    return total


def spread(groups: tuple[Group, ...], total: int, top_k: int) -> tuple[int, ...]:
    """``total`` slots over the groups in proportion to their experts, each at least ``top_k`` and at most all."""
    every = sum(group.all_experts for group in groups)
    least = [min(top_k, group.all_experts) for group in groups]
    slots = [max(low, total * g.all_experts // every) for low, g in zip(least, groups, strict=True)]
    for index, group in enumerate(groups):
        spare = total - sum(slots)
        slots[index] = min(group.all_experts, max(least[index], slots[index] + spare))
    return tuple(slots)


def least_slots(groups: tuple[Group, ...], top_k: int) -> int:
    """The fewest slots that work: every group can hold one token's experts."""
    return sum(min(top_k, group.all_experts) for group in groups)


def _decide_total(
    groups: tuple[Group, ...], setup: MoESetup, options: OffloadOptions, room: int, window_bytes: int
) -> tuple[int, str]:
    every, top_k = sum(group.all_experts for group in groups), setup.shape.top_k
    least = least_slots(groups, top_k)

    def takes(total: int) -> int:
        return device_bytes(groups, spread(groups, total, top_k)) + window_bytes

    fitting = _most(takes, least, every, room)
    most = fitting if fitting >= least else None
    if options.slots is not None or options.fraction is not None:
        flag = f"--moe-offload-slots {options.slots}"
        total, asked = options.slots or 0, flag
        if options.fraction is not None:
            asked = f"--moe-offload-fraction {options.fraction:g}"
            total = max(least, int(every * options.fraction))
        if total < least:
            raise RefusedPlan(flag, f"one token is routed to {top_k} experts", f"use at least {least} slots")
        total = min(total, every)
        if takes(total) > room:
            raise _too_big(asked, takes(total), room, most)
        return total, asked
    allowed, why = room, "as many as fit"
    if options.memory_bytes is not None:
        why = f"--moe-offload-memory-bytes {options.memory_bytes}"
        if options.memory_bytes > room:
            raise _too_big(why, options.memory_bytes, room, most)
        allowed = options.memory_bytes
    total = _most(takes, least, every, allowed)
    if total < least:
        raise RefusedPlan(
            f"--moe-strategy {NAME}" if options.memory_bytes is None else why,
            f"the fewest slots, {least}, take {format_bytes(takes(least))}; {format_bytes(max(allowed, 0))} may be"
            " taken",
            "lower --max-seq-len, --kv-tokens, --max-prefill-tokens or --moe-offload-window-tokens, or raise"
            " --memory-ratio or --device-memory-bytes",
        )
    return total, why


def _most(takes: Callable[[int], int], least: int, every: int, room: int) -> int:
    """The largest number of slots from ``least`` to ``every`` that fits; ``least − 1`` when not even that does."""
    low, high = least - 1, every
    while low < high:
        middle = (low + high + 1) // 2
        if takes(middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _too_big(asked: str, need: int, room: int, most: int | None) -> RefusedPlan:
    fix = f"use --moe-offload-slots {most} or fewer, or lower" if most is not None else "lower"
    return RefusedPlan(
        asked,
        f"it takes {format_bytes(need)} of device memory; {format_bytes(max(room, 0))} are left beside the other"
        " weights, a step and KV",
        f"{fix} --max-seq-len, --kv-tokens or --max-prefill-tokens",
    )


def _window(setup: MoESetup, options: OffloadOptions) -> tuple[int, int]:
    """Tokens of a window (0: no prompt is longer than a chunk) and the bytes that its hidden states take."""
    tokens = min(options.window_tokens, setup.max_seq_tokens)
    if tokens <= setup.max_tokens:
        return 0, 0
    return tokens, WINDOW_TENSORS * tokens * setup.shape.hidden * itemsize_bytes(setup.dtype)


def _refuse_two_sizes(options: OffloadOptions) -> None:
    given = [name for name in ("slots", "fraction", "memory_bytes") if getattr(options, name) is not None]
    if len(given) > 1:
        flags = " and ".join(f"--moe-offload-{name.replace('_', '-')}" for name in given)
        raise RefusedPlan(flags, "they say the same thing in different ways", "give one of them")
