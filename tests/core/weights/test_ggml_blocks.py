"""Dequantised blocks; oracle: the `gguf` package's numpy dequantisers, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from freetoken.weights.ggml_blocks import WEIGHTS_AT_ONCE, dequantise_rows
from freetoken.weights.ggml_types import BLOCK_TYPES


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES))
def test_random_bytes_dequantise_as_in_the_gguf_package(name: str) -> None:
    kind = BLOCK_TYPES[name]
    raw = np.random.default_rng(7).integers(0, 256, (67, 3 * kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are infinities and NaNs now and then
        want = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind.number))
    got = dequantise_rows(name, torch.from_numpy(raw)).numpy()
    assert got.shape == want.shape == (67, 3 * kind.block)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{(~same).sum()} of {same.size} weights differ"


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES))
def test_the_table_of_sizes_equals_the_gguf_packages(name: str) -> None:
    kind = BLOCK_TYPES[name]
    number = gguf.GGMLQuantizationType(kind.number)
    assert number.name.lower() == name
    assert gguf.GGML_QUANT_SIZES[number] == (kind.block, kind.block_bytes)


def test_leading_axes_and_chunks_do_not_change_a_weight() -> None:
    """Oracle: block by block through the same function. The tensor is larger than one chunk."""
    kind = BLOCK_TYPES["q4_1"]
    rows = WEIGHTS_AT_ONCE // kind.block + 5
    raw = torch.randint(0, 120, (2, rows, 2 * kind.block_bytes), dtype=torch.uint8)
    whole = dequantise_rows("q4_1", raw)
    assert whole.shape == (2, rows, 2 * kind.block)
    assert torch.equal(whole[1, rows - 1], dequantise_rows("q4_1", raw[1, rows - 1 :]).view(-1))
    assert torch.equal(whole[0, 3], dequantise_rows("q4_1", raw[0, 3:4]).view(-1))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_quantised_weights_come_back_close(name: str) -> None:
    """Oracle: the weights before quantisation, within one step of the format."""
    weights = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType(BLOCK_TYPES[name].number))
    back = dequantise_rows(name, torch.from_numpy(packed)).numpy()
    step = np.ptp(weights) / (2 ** int(name[1]) - 1)
    assert np.abs(back - weights).max() <= step
