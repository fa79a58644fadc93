"""Pieces of stored tensors; oracle: the same piece of the dequantised whole."""

from __future__ import annotations

import pytest
import torch

from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import Source, StoredTensor
from freetoken.weights.codecs import BlockCodec, PlainCodec, unpermuted
from freetoken.weights.ggml_types import BLOCK_TYPES

SOURCES = [
    Source("t"),
    Source("t", index=2),
    Source("t", index=1, rows=(4, 12)),
    Source("t", rows=(1, 3)),
    Source("t", index=0, unpermute_heads=2),
    Source("t", index=0, rows=(8, 16), unpermute_heads=4),
]


def of_whole(whole: torch.Tensor, source: Source) -> torch.Tensor:
    """The reference: plain indexing in the documented order."""
    if source.index is not None:
        whole = whole[source.index]
    if source.transpose:
        whole = whole.mT
    if source.rows is not None:
        whole = whole[source.rows[0] : source.rows[1]]
    return unpermuted(whole, source.unpermute_heads) if source.unpermute_heads else whole


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["q4_1", "q6_k"])
def test_a_piece_of_blocks_is_the_piece_of_the_weights(name: str, source: Source) -> None:
    kind = BLOCK_TYPES[name]
    raw = torch.randint(0, 120, (3, 16, 2 * kind.block_bytes), dtype=torch.uint8)
    tensor = StoredTensor("t", f"gguf.{name}", (3, 16, 2 * kind.block), {"data": raw}, "file")
    codec = BlockCodec(name)
    piece = codec.take(tensor, source)
    want = of_whole(codec.dequantise(tensor), source)
    assert piece.shape == tuple(want.shape)
    assert piece.format == tensor.format
    torch.testing.assert_close(codec.dequantise(piece), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("source", [*SOURCES, Source("t", index=1, rows=(2, 30), transpose=True)])
def test_a_piece_of_plain_elements(source: Source) -> None:
    data = torch.randn(3, 16, 32).to(torch.bfloat16)
    tensor = StoredTensor("t", "bfloat16", (3, 16, 32), {"data": data}, "file")
    piece = PlainCodec().take(tensor, source)
    assert torch.equal(PlainCodec().dequantise(piece), of_whole(data, source).float())
    if not source.unpermute_heads:
        assert piece.parts["data"].untyped_storage().data_ptr() == data.untyped_storage().data_ptr()


def test_unpermuting_undoes_llama_cpps_converter() -> None:
    """Oracle: the converter's permutation as its source states it: halves of each head interleaved into pairs."""
    heads, dim = 3, 8
    rows = torch.randn(heads * dim, 5)
    permuted = rows.view(heads, 2, dim // 2, 5).swapaxes(1, 2).reshape(rows.shape)
    assert not torch.equal(permuted, rows)
    assert torch.equal(unpermuted(permuted, heads), rows)
    assert torch.equal(unpermuted(permuted[:, 0], heads), rows[:, 0])


def test_blocks_cannot_be_transposed_and_bad_pieces_are_named() -> None:
    raw = torch.zeros(4, BLOCK_TYPES["q8_0"].block_bytes, dtype=torch.uint8)
    tensor = StoredTensor("t", "gguf.q8_0", (4, 32), {"data": raw}, "some.gguf")
    with pytest.raises(CheckpointError, match=r"(?s)some\.gguf transposed.*gguf\.q8_0"):
        BlockCodec("q8_0").take(tensor, Source("t", transpose=True))
    with pytest.raises(CheckpointError, match="rows 2 to 5"):
        BlockCodec("q8_0").take(tensor, Source("t", rows=(2, 5)))
