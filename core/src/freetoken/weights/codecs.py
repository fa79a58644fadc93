"""The arithmetic of formats with one part: plain elements, and rows of GGML blocks."""

from __future__ import annotations

from math import prod

from attrs import evolve, frozen
from torch import Tensor

from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import Source, StoredTensor
from freetoken.weights.ggml_blocks import dequantise_rows
from freetoken.weights.slots import source_shape


@frozen
class PlainCodec:
    """Elements as torch knows them: part ``data`` has the logical shape."""

    def dequantise(self, tensor: StoredTensor) -> Tensor:
        """``data`` in float32, exactly."""
        return tensor.parts["data"].float()

    def take(self, tensor: StoredTensor, source: Source) -> StoredTensor:
        """The piece as a view; a copy only where heads are put back in order."""
        return _taken(tensor, source)


@frozen
class BlockCodec:
    """Rows of GGML blocks: part ``data`` is uint8, its last axis the bytes of a row."""

    block_type: str

    def dequantise(self, tensor: StoredTensor) -> Tensor:
        """The logical tensor in float32, bit by bit what GGML's own reference gives."""
        return dequantise_rows(self.block_type, tensor.parts["data"]).view(tensor.shape)

    def take(self, tensor: StoredTensor, source: Source) -> StoredTensor:
        """Whole rows, still packed. Raises ``CheckpointError`` for a transpose: blocks run along the rows."""
        if source.transpose:
            raise CheckpointError(
                f"take {tensor.name} from {tensor.file} transposed",
                f"it is stored as {tensor.format}, whose blocks run along the last axis",
                "use a checkpoint that stores it untransposed, or in a plain dtype",
            )
        return _taken(tensor, source)


def _taken(tensor: StoredTensor, source: Source) -> StoredTensor:
    """Steps in the order of ``slots.source_shape``."""
    try:
        shape = source_shape(tensor.shape, source)
    except ValueError as error:
        raise CheckpointError(f"take a piece of {tensor.name} from {tensor.file}", str(error)) from None
    data = tensor.parts["data"]
    if source.index is not None:
        data = data[source.index]
    if source.transpose:
        data = data.transpose(-1, -2)
    if source.rows is not None:
        data = data[slice(*source.rows)]
    if source.unpermute_heads:
        data = unpermuted(data, source.unpermute_heads)
    return evolve(tensor, shape=shape, parts={"data": data})


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Rotary halves in place of pairs: row ``2i + j`` of each head of ``[heads × D, …]`` moves to ``i + jD/2``.

    llama.cpp's converter stores Q and K of its ``llama`` architecture in pairs; Hugging Face's layout is halves.
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, prod(rows.shape[1:])).swapaxes(1, 2).reshape(rows.shape)


def plain_tensor(name: str, data: Tensor, file: str) -> StoredTensor:
    """``data`` as a stored tensor of the plain format named like its dtype."""
    return StoredTensor(name, str(data.dtype).removeprefix("torch."), tuple(data.shape), {"data": data}, file)
