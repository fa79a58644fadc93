"""Which expert lies in which slot: the state and its arithmetic in torch, the oracle of the kernels.

Every function changes tensors in place and depends on them alone. ``select`` → ``place`` → ``settle`` is one look-up:

1. ``select`` sorts the experts of one layer that a step is routed to into hits and misses;
2. ``place`` gives each miss the slot whose expert may leave first, never one that this look-up needs;
3. ``settle`` writes the new owners down, translates routed experts to slots, and counts.

An expert's number in the group's table is ``row · E + expert``; −1 means none. *Clock* counts look-ups.

The order of leaving is one 64-bit key, least first, ties by slot: empty slots, then by policy, then experts of the
layer at hand where it is ``keep``. ``lru``: the clock of the last use. ``lfu-decay``: a count that each use raises and
that halves every ``2 ** half_life`` look-ups, then the last use (least frequently used with aging: Robinson and
Devarakonda 1990, "Data cache management using frequency-based replacement"; here exact in integers).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from freetoken_moe_offload.budget import list_room

USE = 256  # what one use adds to a count: eight halvings until it is forgotten
MAX_HALVINGS = 31
COUNT_SHIFT = 40  # a key is the count, then forty bits of clock
KEEP_BIT = 1 << 62
UNSELECTED, HIT, MISS = 0, 1, 2  # kinds of experts; a miss number n has kind MISS + n
COUNTERS = ("decode_hits", "decode_misses", "prefill_hits", "prefill_misses", "decode_stall_ns")
HEADER = 4  # misses and hits of the look-up stand before the lists


@frozen(eq=False)
class IndexState:
    """One group's tensors, all on its device; ``E`` experts a layer, ``N`` in the table, ``S`` slots.

    ``lists`` is ``[4 + 2 · room] i32``: the misses, the hits, two spare places, then the experts to fetch and the slots
    they go to.
    """

    owner: Tensor  # [S] i32: table number of the expert in each slot
    slot_of: Tensor  # [N] i32
    last: Tensor  # [N] i64: clock of the last use
    used: Tensor  # [N] i32: the decayed count as of ``last``
    clock: Tensor  # [1] i64
    wanted: Tensor  # [E] i32: 1 for experts routed to; all 0 between look-ups
    kind: Tensor  # [E] i32
    target: Tensor  # [E] i32: the slot of each selected expert
    lists: Tensor
    counters: Tensor  # [8] i64, see COUNTERS
    experts: int
    slots: int

    @property
    def room(self) -> int:
        return (self.lists.numel() - HEADER) // 2

    @property
    def fetch_experts(self) -> Tensor:
        return self.lists[HEADER : HEADER + self.room]

    @property
    def fetch_slots(self) -> Tensor:
        return self.lists[HEADER + self.room :]


def make_state(layers: int, experts: int, slots: int, device: torch.device) -> IndexState:
    """An index with every slot empty."""
    table, room = layers * experts, list_room(experts, slots)

    def filled(count: int, value: int, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    return IndexState(
        owner=filled(slots, -1, torch.int32),
        slot_of=filled(table, -1, torch.int32),
        last=filled(table, 0, torch.int64),
        used=filled(table, 0, torch.int32),
        clock=filled(1, 2, torch.int64),
        wanted=filled(experts, 0, torch.int32),
        kind=filled(experts, 0, torch.int32),
        target=filled(experts, -1, torch.int32),
        lists=filled(HEADER + 2 * room, 0, torch.int32),
        counters=filled(8, 0, torch.int64),
        experts=experts,
        slots=slots,
    )


def fill(state: IndexState, numbers: list[int]) -> None:
    """Give the first slots to the experts with these table numbers; they count as used once, long ago."""
    ids = torch.tensor(numbers, dtype=torch.int64, device=state.owner.device)
    slots = torch.arange(len(numbers), dtype=torch.int32, device=state.owner.device)
    state.owner[: len(numbers)] = ids.int()
    state.slot_of.index_copy_(0, ids, slots)
    state.last.index_fill_(0, ids, 1)
    state.used.index_fill_(0, ids, USE)


def on_host(state: IndexState) -> IndexState:
    """The tables that say who leaves first, copied to the host; on a CPU the state itself."""
    if state.owner.device.type == "cpu":
        return state
    names = ("owner", "slot_of", "last", "used", "clock")
    return evolve(state, **{name: getattr(state, name).cpu() for name in names})


def popularity(state: IndexState, half_life: int) -> list[int]:
    """``[N]``: how often each expert was used of late, uses counted as ``USE`` and halved with time."""
    host = on_host(state)
    halvings = ((host.clock >> half_life) - (host.last >> half_life)).clamp(max=MAX_HALVINGS)
    return (host.used >> halvings.int()).tolist()


def pretend(state: IndexState) -> None:
    """Every expert of every layer in some slot: a look-up then only hits. For rehearsals."""
    table = torch.arange(state.slot_of.numel(), dtype=torch.int32, device=state.owner.device)
    state.slot_of.copy_(table % state.experts % state.slots)


# ------------------------------------------------------------------------------------------------ one look-up


def mark(state: IndexState, experts: Tensor) -> None:
    """Note the routed ``experts [T, K] i32``."""
    state.wanted.index_fill_(0, experts.reshape(-1).long(), 1)


def select(state: IndexState, row: int, first: int) -> None:
    """Sort the wanted experts number ``first`` … ``first + S − 1`` of layer ``row`` into hits and misses."""
    wanted = state.wanted != 0
    rank = wanted.int().cumsum(0) - 1
    inside = wanted & (rank >= first) & (rank < first + state.slots)
    here = state.slot_of[row * state.experts : (row + 1) * state.experts]
    miss = inside & (here < 0)
    hit = inside & ~miss
    number = miss.int().cumsum(0) - 1
    state.kind.copy_(torch.where(miss, MISS + number, hit.int() * HIT))
    state.target.copy_(torch.where(hit, here, -1))
    missing = miss.nonzero().reshape(-1)
    state.lists[0] = len(missing)
    state.lists[1] = hit.sum()
    state.fetch_experts[: len(missing)] = missing.int()


def leaving_keys(state: IndexState, row: int, keep: bool, decay: bool, half_life: int) -> tuple[Tensor, Tensor]:
    """``(keys [S] i64, rows [S] i64)``: the order of leaving, and whose expert a slot holds; −1 where it is empty."""
    held = state.owner >= 0
    number = state.owner.clamp(min=0).long()
    last = state.last[number]
    key = last
    if decay:
        halvings = ((state.clock >> half_life) - (last >> half_life)).clamp(max=MAX_HALVINGS)
        key = ((state.used[number].long() >> halvings) << COUNT_SHIFT) | last
    rows = torch.where(held, number // state.experts, -1)
    if keep:
        key = torch.where(rows == row, key | KEEP_BIT, key)
    return torch.where(held, key, -1), rows


def eviction_keys(state: IndexState, row: int, keep: bool, decay: bool, half_life: int) -> tuple[Tensor, Tensor]:
    """``(keys [S] i64, evictable [S] bool)``."""
    key, rows = leaving_keys(state, row, keep, decay, half_life)
    number = state.owner.clamp(min=0).long()
    needed = (rows == row) & (state.kind[number % state.experts] != UNSELECTED)
    return key, ~needed


def place(state: IndexState, row: int, keep: bool, decay: bool, half_life: int) -> None:
    """A slot for every miss, least key first."""
    key, evictable = eviction_keys(state, row, keep, decay, half_life)
    order = torch.argsort(key, stable=True)
    order = order[evictable[order]]
    count = int(state.lists[0])
    slots = order[:count].int()
    state.fetch_slots[:count] = slots
    state.target.index_copy_(0, state.fetch_experts[:count].long(), slots)


def give(state: IndexState, row: int, experts: Tensor, slots: Tensor) -> None:
    """Write down that ``slots [n] i64`` hold ``experts [n] i32`` of layer ``row`` from now on."""
    old = state.owner[slots]
    state.slot_of.index_fill_(0, old[old >= 0].long(), -1)
    numbers = row * state.experts + experts
    state.owner.index_copy_(0, slots, numbers)
    state.slot_of.index_copy_(0, numbers.long(), slots.int())


def ahead(
    state: IndexState, row: int, experts: Sequence[int], guarded: int, most: int, decay: bool, half_life: int
) -> tuple[list[int], list[int]]:
    """Before layer ``row`` is asked for: which of ``experts`` to fetch, first come first, and the slots they go to.

    At most ``most``, and never a slot of that layer or of layer ``guarded``, which is about to be computed.
    """
    key, rows = leaving_keys(state, row, False, decay, half_life)
    order = torch.argsort(key, stable=True)
    free = order[(rows[order] != row) & (rows[order] != guarded)]
    slot_of = state.slot_of[row * state.experts : (row + 1) * state.experts].tolist()
    missing = [expert for expert in experts if slot_of[expert] < 0]
    count = min(most, len(free), len(missing))
    return missing[:count], free[:count].tolist()


def settle(
    state: IndexState, experts: Tensor, row: int, touch: bool, final: bool, half_life: int, cause: int
) -> Tensor:
    """New owners, uses and counters; returns the slots ``[T, K] i32`` of ``experts``, −1 for those not selected.

    ``touch`` counts the selected experts as used; ``final`` clears ``wanted``. ``cause``: 0 decode, 1 prefill.
    """
    count = int(state.lists[0])
    give(state, row, state.fetch_experts[:count], state.fetch_slots[:count].long())
    if touch:
        chosen = row * state.experts + (state.kind != UNSELECTED).nonzero().reshape(-1)
        halvings = ((state.clock >> half_life) - (state.last[chosen] >> half_life)).clamp(max=MAX_HALVINGS)
        state.used[chosen] = (state.used[chosen] >> halvings.int()) + USE
        state.last[chosen] = state.clock
    state.clock.add_(1)
    state.counters[2 * cause] += state.lists[1]
    state.counters[2 * cause + 1] += state.lists[0]
    if final:
        state.wanted.zero_()
    return state.target[experts.long()]


class TorchIndex:
    """The look-up in torch: on a CPU, and wherever the kernels cannot run."""

    def __init__(self, decay: bool, half_life: int) -> None:
        self._decay = decay
        self._half_life = half_life

    def look_up(
        self, state: IndexState, experts: Tensor, row: int, *, first: int = 0, final: bool = True, touch: bool = False,
        keep: bool = False, cause: int = 0,
    ) -> Tensor:  # fmt: skip
        """All three steps; the slots of ``experts``."""
        mark(state, experts)
        select(state, row, first)
        place(state, row, keep, self._decay, self._half_life)
        return settle(state, experts, row, touch, final, self._half_life, cause)
