"""Products with matrices that stay in GGUF blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.errors import PluginError
from freetoken.vocab.weight import StoredTensor
from freetoken_kernels_llvm.forms import TILE_ROWS, form_of
from freetoken_kernels_llvm.tiles import Tiles, pack_tiles


def load(setup: KernelSetup) -> LoadedKernel:
    """Compiles for the shape's formats. Raises ``PluginError`` where LLVM or torch's threads cannot be loaded."""
    form = form_of(setup.shape.formats)
    try:
        from freetoken_kernels_llvm.machine import product

        run, threads = product(form).run, setup.threads
    except (ImportError, OSError, AttributeError) as error:
        raise PluginError("kernel llvm", f"it cannot be made: {error}", "use --kernel linear=cpu-packed") from error

    def call(x: Tensor, tiles: Tiles) -> Tensor:
        """``x [M, I]`` → ``[M, O]``, float32."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        count, groups, blocks = x.shape[0], tiles.data.shape[0], tiles.data.shape[1]
        out = torch.empty(count, groups * TILE_ROWS, dtype=torch.float32)
        sums = torch.empty(count, blocks, dtype=torch.float32)  # not on the stack: 10 MB for long chunks of wide models
        if count:
            run(
                tiles.data.data_ptr(), x.data_ptr(), out.data_ptr(), sums.data_ptr(),
                groups, blocks, count, x.stride(0), threads,
            )  # fmt: skip
        return out if tiles.rows == out.shape[1] else out[:, : tiles.rows].contiguous()

    def pack(tensors: Sequence[StoredTensor]) -> Tiles:
        return pack_tiles(tensors, form)

    return LoadedKernel(call, pack)
