"""Packs stored matrices into tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import StoredTensor
from freetoken.weights.ggml_blocks import Affine, affine
from freetoken.weights.ggml_types import BLOCK_TYPES
from freetoken_kernels_llvm.forms import LIFT, PREFIX, TILE_ROWS, Form

ROWS_AT_ONCE = 1024  # bounds temporaries; a multiple of a tile


@frozen(eq=False)
class Tiles:
    """A matrix ``[rows, cols]``: ``data [ceil(rows / 16), cols / block, tile bytes]`` uint8 on the CPU."""

    data: Tensor
    form: Form
    rows: int
    cols: int


def pack_tiles(tensors: Sequence[StoredTensor], form: Form) -> Tiles:
    """The matrices stacked along their rows. Raises ``CheckpointError`` where they are not matrices of one width."""
    cols = tensors[0].shape[-1] if tensors else 0
    if not tensors or any(len(t.shape) != 2 or t.shape[1] != cols for t in tensors) or cols % form.block:
        names = ", ".join(f"{t.name} {list(t.shape)}" for t in tensors) or "nothing"
        raise CheckpointError(f"one matrix of {names}", "only matrices of one width in whole blocks can be stacked")
    rows = sum(t.shape[0] for t in tensors)
    groups = -(-rows // TILE_ROWS)
    data = torch.zeros(groups, cols // form.block, form.tile_bytes, dtype=torch.uint8)
    pending: list[Affine] = []
    held = done = 0
    for tensor in tensors:
        for first in range(0, tensor.shape[0], ROWS_AT_ONCE):
            piece = _rows(tensor, first, min(first + ROWS_AT_ONCE, tensor.shape[0]), form)
            pending.append(piece)
            held += piece.scales.shape[0]
            whole = held // TILE_ROWS * TILE_ROWS
            if whole:
                joined = _joined(pending)
                _write(data[done // TILE_ROWS : (done + whole) // TILE_ROWS], _part(joined, 0, whole), form)
                pending, held, done = [_part(joined, whole, held)], held - whole, done + whole
    if held:
        _write(data[done // TILE_ROWS :], _padded(_joined(pending), TILE_ROWS - held), form)
    return Tiles(data, form, rows, cols)


def _rows(tensor: StoredTensor, first: int, stop: int, form: Form) -> Affine:
    """Rows ``[first, stop)`` as the form wants them: ``scales``, ``offsets [n, B]``, ``codes [n, cols]``."""
    name = tensor.format.removeprefix(PREFIX)
    raw = tensor.parts["data"][first:stop].reshape(-1, BLOCK_TYPES[name].block_bytes)
    taken = affine(name, raw)
    if form.nibbles and name in LIFT:
        lift = LIFT[name]
        taken = Affine(taken.scales, (taken.codes + lift).view(torch.uint8), taken.scales * -lift)
    width = taken.codes.shape[1] // taken.scales.shape[1]
    again, rows = width // form.block, stop - first
    offsets = taken.offsets
    if form.offsets and offsets is None:
        offsets = torch.zeros_like(taken.scales)
    return Affine(
        taken.scales.repeat_interleave(again, 1).view(rows, -1),
        taken.codes.view(torch.uint8).reshape(rows, -1),
        None if offsets is None else offsets.repeat_interleave(again, 1).view(rows, -1),
    )


def _joined(parts: Sequence[Affine]) -> Affine:
    if len(parts) == 1:
        return parts[0]
    offsets = [p.offsets for p in parts if p.offsets is not None]
    return Affine(
        torch.cat([p.scales for p in parts]),
        torch.cat([p.codes for p in parts]),
        torch.cat(offsets) if offsets else None,
    )


def _part(whole: Affine, low: int, high: int) -> Affine:
    offsets = None if whole.offsets is None else whole.offsets[low:high]
    return Affine(whole.scales[low:high], whole.codes[low:high], offsets)


def _padded(part: Affine, rows: int) -> Affine:
    """With ``rows`` more rows of nothing."""
    offsets = part.offsets
    return evolve(
        part,
        scales=torch.cat((part.scales, part.scales.new_zeros(rows, part.scales.shape[1]))),
        codes=torch.cat((part.codes, part.codes.new_zeros(rows, part.codes.shape[1]))),
        offsets=None if offsets is None else torch.cat((offsets, offsets.new_zeros(rows, offsets.shape[1]))),
    )


def _write(out: Tensor, part: Affine, form: Form) -> None:
    """Whole tiles into ``out [groups, B, tile bytes]``."""
    groups, blocks = out.shape[:2]
    head = torch.float32 if form.wide else torch.float16
    heads = [part.scales] if part.offsets is None else [part.scales, part.offsets]
    size = TILE_ROWS * form.scale_bytes
    for place, values in enumerate(heads):
        lanes = values.to(head).view(groups, TILE_ROWS, blocks).transpose(1, 2).contiguous()
        out[:, :, size * place : size * (place + 1)] = lanes.view(torch.uint8).view(groups, blocks, size)
    columns = part.codes.view(groups, TILE_ROWS, blocks, form.block).permute(0, 2, 3, 1)  # [groups, B, block, 16]
    if form.nibbles:
        columns = columns[..., :8] | (columns[..., 8:] << 4)
    out[:, :, form.codes_at :] = columns.reshape(groups, blocks, -1)
