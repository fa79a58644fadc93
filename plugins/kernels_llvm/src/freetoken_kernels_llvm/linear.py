"""Products with matrices that stay in GGUF blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.weight import StoredTensor
from freetoken_kernels_llvm.forms import TILE_ROWS, form_of
from freetoken_kernels_llvm.machine import product
from freetoken_kernels_llvm.tiles import Tiles, pack_tiles


def load(setup: KernelSetup) -> LoadedKernel:
    """Compiles for the shape's formats."""
    form = form_of(setup.shape.formats)
    run, threads = product(form).run, setup.threads

    def call(x: Tensor, tiles: Tiles) -> Tensor:
        """``x [M, I]`` → ``[M, O]``, float32."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        count, groups, blocks = x.shape[0], tiles.data.shape[0], tiles.data.shape[1]
        out = torch.empty(count, groups * TILE_ROWS, dtype=torch.float32)
        if count:
            run(tiles.data.data_ptr(), x.data_ptr(), out.data_ptr(), groups, blocks, count, x.stride(0), threads)
        return out if tiles.rows == out.shape[1] else out[:, : tiles.rows].contiguous()

    def pack(tensors: Sequence[StoredTensor]) -> Tiles:
        return pack_tiles(tensors, form)

    return LoadedKernel(call, pack)
