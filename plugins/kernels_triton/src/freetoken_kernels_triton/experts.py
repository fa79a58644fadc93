"""``experts``: the chosen experts' weighted sum, without a host synchronisation at any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from attrs import frozen

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import BoundLaunch, bind
from freetoken.plugin.protocols import BankPart, KernelSetup, LoadedKernel
from freetoken.vocab.availability import Availability
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import LaunchArg, StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.experts_tiles import SLOT_PAIRS, Form, choose_form
from freetoken_kernels_triton.tiles import GemmTile, blocks, dot_precision, next_power_of_2, row_multiple

if TYPE_CHECKING:
    from torch import Tensor

    from freetoken.vocab.weight import StoredTensor

MODULE = "freetoken_kernels_triton.experts_kernel:"
ALIGN_PAIRS = 4096
COMBINE_COLS = 1024
_I32 = TensorArg("int32")
_F32 = TensorArg("float32")


def accepts(shape: OpShape) -> Availability:
    """Matrices whose rows are aligned."""
    for n in (shape.cols, shape.intermediate):
        if n % row_multiple(shape.dtype):
            return Availability.no(f"{n} columns are not a multiple of {row_multiple(shape.dtype)}")
    return Availability.yes()


def packed_bytes(shape: OpShape) -> int:
    """Bytes of one packed expert."""
    return 3 * shape.intermediate * shape.cols * itemsize_bytes(shape.dtype)


def bank_layout(shape: OpShape) -> tuple[BankPart, ...]:
    """``gate_up [2I, H]``, rows of gate and up by turns, and ``down [H, I]``."""
    return (
        BankPart("gate_up", shape.dtype, (2 * shape.intermediate, shape.cols)),
        BankPart("down", shape.dtype, (shape.cols, shape.intermediate)),
    )


# ------------------------------------------------------------------------------------------------ the launches


def step_launches(
    tokens: int, bank_slots: int, stride: int, shape: OpShape, device: Device
) -> tuple[TritonLaunch, ...]:
    """The launches for ``tokens`` rows of hidden, ``stride`` elements apart, over a bank of ``bank_slots``."""
    form = choose_form(tokens, shape, device)
    make: Mapping[str, Callable[..., tuple[TritonLaunch, ...]]] = {"pair": _pair, "slot": _slot, "tile": _tile}
    return make[form.name](form, tokens, bank_slots, stride, shape, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    return step_launches(point.tokens, shape.experts, shape.cols, shape, device)


def num_tiles(pairs: int, bank_slots: int, rows: int) -> int:
    """Places in the tile table: enough whatever the routing is."""
    return pairs // rows + bank_slots


def _launch(
    name: str,
    args: tuple[tuple[str, LaunchArg], ...],
    constexprs: Mapping[str, object],
    grid: tuple[int, int],
    tile: GemmTile | None = None,
) -> TritonLaunch:
    warps, stages = (tile.num_warps, tile.num_stages) if tile else (4, 3)
    return TritonLaunch(MODULE + name, args, tuple(constexprs.items()), (*grid, 1), warps, stages)


def _pair(form: Form, tokens: int, _: int, stride: int, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    data = TensorArg(shape.dtype)
    sizes = {"H": shape.cols, "I": shape.intermediate, "K": shape.top_k}
    up = _launch(
        "pair_up_kernel",
        (("hidden", data), ("slots", _I32), ("gate_up", data), ("inner", data), ("hidden_stride", stride)),
        {**sizes, "BLOCK_N": form.up.n, "BLOCK_K": form.up.k},
        (blocks(shape.intermediate, form.up.n), tokens * shape.top_k),
        form.up,
    )
    down = _launch(
        "pair_down_kernel",
        (("inner", data), ("weights", _F32), ("slots", _I32), ("down", data), ("out", data)),
        {
            **sizes,
            "RANKS": min(form.ranks, next_power_of_2(shape.top_k)),
            "BLOCK_N": form.down.n,
            "BLOCK_K": form.down.k,
        },
        (blocks(shape.cols, form.down.n), tokens),
        form.down,
    )
    return dependent(up, device), dependent(down, device)


def _product(tile: GemmTile, shape: OpShape) -> dict[str, object]:
    return {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "PRECISION": dot_precision(shape.dtype)}


def _combine(tokens: int, shape: OpShape, device: Device) -> TritonLaunch:
    data = TensorArg(shape.dtype)
    block = min(next_power_of_2(shape.cols), COMBINE_COLS)
    made = _launch(
        "combine_kernel",
        (("parts", data), ("slots", _I32), ("out", data)),
        {"H": shape.cols, "K": shape.top_k, "BLOCK_H": block},
        (tokens, blocks(shape.cols, block)),
    )
    return dependent(made, device)


def _slot(
    form: Form, tokens: int, bank_slots: int, stride: int, shape: OpShape, device: Device
) -> tuple[TritonLaunch, ...]:
    data, pairs = TensorArg(shape.dtype), tokens * shape.top_k
    sizes = {"H": shape.cols, "I": shape.intermediate}
    up = _launch(
        "slot_up_kernel",
        (
            ("hidden", data), ("slots", _I32), ("gate_up", data), ("inner", data), ("pairs", pairs),
            ("hidden_stride", stride),
        ),
        {**sizes, "K": shape.top_k, "BLOCK_P": SLOT_PAIRS, **_product(form.up, shape)},
        (blocks(2 * shape.intermediate, form.up.n), bank_slots),
        form.up,
    )  # fmt: skip
    down = _launch(
        "slot_down_kernel",
        (("inner", data), ("weights", _F32), ("slots", _I32), ("down", data), ("parts", data), ("pairs", pairs)),
        {**sizes, "BLOCK_P": SLOT_PAIRS, **_product(form.down, shape)},
        (blocks(shape.cols, form.down.n), bank_slots),
        form.down,
    )
    return dependent(up, device), dependent(down, device), _combine(tokens, shape, device)


def _tile(
    form: Form, tokens: int, bank_slots: int, stride: int, shape: OpShape, device: Device
) -> tuple[TritonLaunch, ...]:
    data, pairs = TensorArg(shape.dtype), tokens * shape.top_k
    tiles = num_tiles(pairs, bank_slots, form.up.m)
    sizes = {"H": shape.cols, "I": shape.intermediate}
    table = (("order", _I32), ("tile_slots", _I32), ("tile_rows", _I32), ("tile_ends", _I32))
    align = _launch(
        "align_kernel",
        (("slots", _I32), *table, ("pairs", pairs), ("tiles", tiles)),
        {"BLOCK_M": form.up.m, "BLOCK_P": ALIGN_PAIRS},
        (bank_slots, 1),
        GemmTile(0, 0, 0, num_warps=8, num_stages=1),
    )
    up = _launch(
        "tile_up_kernel",
        (("hidden", data), *table, ("gate_up", data), ("inner", data), ("hidden_stride", stride)),
        {**sizes, "K": shape.top_k, **_product(form.up, shape)},
        (tiles * blocks(2 * shape.intermediate, form.up.n), 1),
        form.up,
    )
    down = _launch(
        "tile_down_kernel",
        (("inner", data), ("weights", _F32), *table, ("down", data), ("parts", data)),
        {**sizes, **_product(form.down, shape)},
        (tiles * blocks(shape.cols, form.down.n), 1),
        form.down,
    )
    return align, up, down, _combine(tokens, shape, device)


# ------------------------------------------------------------------------------------------------ the call


@frozen
class Bound:
    """A step's launches, bound, and the sizes of what passes between them."""

    form: Form
    run: tuple[BoundLaunch, ...]
    pairs: int
    tiles: int


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    from freetoken.ops.packing import pack_dense

    shape, device = setup.shape, setup.device
    dtype = getattr(torch, setup.dtype)

    @lru_cache(maxsize=4096)
    def bound(tokens: int, bank_slots: int, stride: int) -> Bound:
        form, pairs = choose_form(tokens, shape, device), tokens * shape.top_k
        run = tuple(bind(launch) for launch in step_launches(tokens, bank_slots, stride, shape, device))
        return Bound(form, run, pairs, num_tiles(pairs, bank_slots, form.up.m))

    def experts(hidden: Tensor, weights: Tensor, slots: Tensor, bank: Mapping[str, Tensor]) -> Tensor:
        """``hidden [T, H]``, ``weights [T, K] f32``, ``slots [T, K] i32`` (contiguous) → ``[T, H]``."""
        gate_up, down = bank["gate_up"], bank["down"]
        out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        if not hidden.shape[0]:
            return out
        step = bound(hidden.shape[0], gate_up.shape[0], hidden.stride(0))
        inner = out.new_empty((step.pairs, shape.intermediate))
        if step.form.name == "pair":
            step.run[0](hidden, slots, gate_up, inner)
            step.run[1](inner, weights, slots, down, out)
            return out
        parts = out.new_empty((step.pairs, shape.cols))
        if step.form.name == "slot":
            step.run[0](hidden, slots, gate_up, inner)
            step.run[1](inner, weights, slots, down, parts)
        else:
            table = _table(slots, step)
            step.run[0](slots, *table)
            step.run[1](hidden, *table, gate_up, inner)
            step.run[2](inner, weights, *table, down, parts)
        step.run[-1](parts, slots, out)
        return out

    def pack(tensors: Sequence[StoredTensor]) -> Mapping[str, Tensor]:
        """Gate ``[I, H]``, up ``[I, H]`` and down ``[H, I]`` of one expert, in that order."""
        gate, up, down = tensors
        halves = [pack_dense([t], setup.dequantise, dtype, device.torch_name) for t in (gate, up)]
        both = torch.stack(halves, dim=1).reshape(2 * gate.shape[0], gate.shape[1])
        return {"gate_up": both, "down": pack_dense([down], setup.dequantise, dtype, device.torch_name)}

    return LoadedKernel(call=experts, pack=pack)


def _table(slots: Tensor, step: Bound) -> tuple[Tensor, ...]:
    """Room for the sorted order and the tile table, rows aligned, in one allocation."""
    width = -(-max(step.pairs, step.tiles) // 4) * 4
    return slots.new_empty((4, width)).unbind(0)
