"""What the look-up and the fetch launch: pure functions of integers, for the call sites and for the warmup alike."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from freetoken.plugin.protocols import BankPart, MoESetup
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import LaunchArg, Launches, StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken.vocab.units import ceil_div
from freetoken_moe_offload.budget import decide, list_room, part_bytes
from freetoken_moe_offload.options import OffloadOptions

INDEX = "freetoken_moe_offload.index_kernel:"
FETCH = "freetoken_moe_offload.fetch_kernel:fetch_kernel"
MARK_PAIRS = 1024  # with more routed pairs, programs of their own note what is wanted
BLOCK_PAIRS = 1024
SELECT_PAIRS = 32
BLOCK_SLOTS, BLOCK_ALL = 32, 256
FETCH_BYTES = 16384  # read by one program at a time
_I32, _I64 = TensorArg("int32"), TensorArg("int64")


@frozen
class Shape:
    """What a group's launches depend on beside the step: experts a layer, slots, and the policy's constants."""

    experts: int
    slots: int
    decay: bool
    half_life: int

    @property
    def block(self) -> int:
        """Experts a layer, as a block."""
        return 1 << max(self.experts - 1, 15).bit_length()

    @property
    def room(self) -> int:
        return list_room(self.experts, self.slots)


def half_life(layers: int) -> int:
    """Log2 of the look-ups in which counts halve: about 128 steps through all layers."""
    return (128 * layers - 1).bit_length()


def _index(name: str, args: tuple[tuple[str, LaunchArg], ...], constexprs: Mapping[str, object], programs: int,
           num_warps: int = 4) -> TritonLaunch:  # fmt: skip
    return TritonLaunch(INDEX + name, args, tuple(constexprs.items()), (programs, 1, 1), num_warps, 1)


def mark(pairs: int) -> TritonLaunch:
    """Note what ``pairs`` routed pairs want."""
    args = (("experts", _I32), ("wanted", _I32), ("pairs", pairs))
    return _index("mark_kernel", args, {"BLOCK": BLOCK_PAIRS}, ceil_div(pairs, BLOCK_PAIRS))


def select(shape: Shape, pairs: int, row: int, first: int, marked: bool) -> TritonLaunch:
    """Sort one layer's wanted experts into hits and misses."""
    args = (
        ("experts", _I32), ("wanted", _I32), ("slot_of", _I32), ("kind", _I32), ("target", _I32), ("lists", _I32),
        ("row", row), ("first", first), ("slots", shape.slots), ("pairs", pairs),
    )  # fmt: skip
    constexprs = {"E": shape.experts, "BLOCK_E": shape.block, "BLOCK_P": SELECT_PAIRS, "MARKED": marked}
    return _index("select_kernel", args, constexprs, 1)


def place(shape: Shape, row: int, keep: bool) -> TritonLaunch:
    """Give each miss a slot."""
    args = (
        ("owner", _I32), ("last", _I64), ("used", _I32), ("clock", _I64), ("kind", _I32), ("target", _I32),
        ("lists", _I32), ("row", row), ("slots", shape.slots), ("room", shape.room),
    )  # fmt: skip
    constexprs = {
        "E": shape.experts, "BLOCK_S": BLOCK_SLOTS, "BLOCK_ALL": BLOCK_ALL, "KEEP": keep, "DECAY": shape.decay,
        "HALF_LIFE": shape.half_life,
    }  # fmt: skip
    return _index("place_kernel", args, constexprs, ceil_div(shape.slots, BLOCK_SLOTS))


def settle(shape: Shape, pairs: int, row: int, touch: bool, final: bool, cause: int) -> TritonLaunch:
    """Write the look-up down and translate the routed pairs."""
    args = (
        ("experts", _I32), ("slots_out", _I32), ("owner", _I32), ("slot_of", _I32), ("last", _I64), ("used", _I32),
        ("clock", _I64), ("wanted", _I32), ("kind", _I32), ("target", _I32), ("lists", _I32), ("counters", _I64),
        ("row", row), ("pairs", pairs), ("room", shape.room), ("touch", int(touch)), ("final", int(final)),
        ("cause", cause),
    )  # fmt: skip
    constexprs = {"E": shape.experts, "BLOCK_E": shape.block, "BLOCK": BLOCK_PAIRS, "HALF_LIFE": shape.half_life}
    return _index("settle_kernel", args, constexprs, ceil_div(pairs, BLOCK_PAIRS))


def word(part: BankPart) -> str:
    """The dtype in which a part is moved: four bytes at a time where they go up evenly."""
    return "uint8" if part_bytes(part) % 4 else "int32"


def fetch(part: BankPart, room: int, multiprocessors: int, timed: bool) -> TritonLaunch:
    """Move one part of every missing expert."""
    data = word(part)
    size = 1 if data == "uint8" else 4
    args = (("host", TensorArg(data)), ("bank", TensorArg(data)), ("lists", _I32), ("counters", _I64), ("room", room))
    constexprs = {"WORDS": part_bytes(part) // size, "BLOCK": FETCH_BYTES // size, "TIMED": timed}
    programs = 2 * max(multiprocessors, 1)
    return TritonLaunch(FETCH, args, tuple(constexprs.items()), (programs, 1, 1), 8, 1)


# ------------------------------------------------------------------------------------------------ the launch space


def look_up(
    shape: Shape, pairs: int, row: int, first: int, touch: bool, final: bool, keep: bool, cause: int
) -> tuple[TritonLaunch, ...]:
    """The launches of one look-up, in order. Only the first pass over a step's pairs marks them."""
    marked = pairs > MARK_PAIRS or first > 0 or not final
    steps = (
        select(shape, pairs, row, first, marked),
        place(shape, row, keep),
        settle(shape, pairs, row, touch, final, cause),
    )
    return (mark(pairs), *steps) if marked and first == 0 else steps


def passes(pairs: int, experts: int, slots: int) -> int:
    """Into how many passes a step of ``pairs`` routed pairs falls, so that each needs no more slots than there are."""
    return max(1, ceil_div(min(pairs, experts), slots))


@frozen
class StepLaunches:
    """The launch function of a sized strategy: one layer of each group of like layers, at a step."""

    groups: tuple[tuple[Shape, tuple[BankPart, ...]], ...]
    top_k: int

    def __call__(self, point: StepPoint, _: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
        if device.kind == "cpu":
            return ()
        pairs, decode = point.tokens * self.top_k, point.max_query == 1
        found: list[TritonLaunch] = []
        for shape, layout in self.groups:
            count = passes(pairs, shape.experts, shape.slots)
            for number in range(count):
                first, final = number * shape.slots, number == count - 1
                found += look_up(shape, pairs, 0, first, decode, final, not decode, 0 if decode else 1)
                if decode:
                    found += [fetch(part, shape.room, device.multiprocessors, True) for part in layout]
        return tuple(found)


def launches(setup: MoESetup) -> Launches:
    """The launch space of the strategy as ``setup`` sizes it."""
    sizes = decide(setup)
    options = setup.options if isinstance(setup.options, OffloadOptions) else OffloadOptions()
    groups = tuple(
        (Shape(group.experts, slots, options.policy != "lru", half_life(len(group.layers))), group.layout)
        for group, slots in zip(sizes.groups, sizes.slots, strict=True)
    )
    return StepLaunches(groups, setup.shape.top_k)
