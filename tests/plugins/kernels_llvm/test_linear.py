"""Products over blocks. Oracle: the float32 reference of GGML's blocks, and a float64 product with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import Tensor

from freetoken.plugin.probe import deep_probe
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.testing.fakes import make_device, normal
from freetoken.testing.kernels import KernelConformance
from freetoken.testing.tolerances import assert_close
from freetoken.vocab.errors import CheckpointError, PluginError
from freetoken.vocab.hardware import Hardware
from freetoken.vocab.ops import OpShape
from freetoken.vocab.weight import StoredTensor
from freetoken.weights.ggml_blocks import dequantise_rows
from freetoken.weights.ggml_types import BLOCK_TYPES
from freetoken_kernels_llvm import probe as probing
from freetoken_kernels_llvm.forms import FORMS, PREFIX, form_of
from freetoken_kernels_llvm.probe import probe
from freetoken_kernels_llvm.spec import SPEC
from freetoken_kernels_llvm.tiles import pack_tiles

# Where each type keeps float16 scales and offsets in its block; MXFP4 has an exponent of one byte.
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,), "mxfp4": (),
}  # fmt: skip
pytestmark = pytest.mark.skipif(not probe(Hardware()), reason=probe(Hardware()).reason)


def blocks(name: str, rows: int, cols: int, seed: int = 0) -> StoredTensor:
    """Random codes under scales near 0.01: every byte of the codes may be anything."""
    kind = BLOCK_TYPES[name]
    raw = torch.randint(0, 256, (rows * cols // kind.block, kind.block_bytes), dtype=torch.uint8,
                        generator=torch.Generator().manual_seed(seed))  # fmt: skip
    scales = (normal(seed + 1)(len(raw), 2) * 0.01).half()
    for place, at in enumerate(HALVES[name]):
        raw[:, at : at + 2] = scales[:, place : place + 1].contiguous().view(torch.uint8)
    if name == "mxfp4":
        raw[:, 0] = 120 + raw[:, 0] % 8
    data = raw.view(rows, cols // kind.block * kind.block_bytes)
    return StoredTensor(f"a {name}", PREFIX + name, (rows, cols), {"data": data}, "a file")


def dequantise(tensor: StoredTensor) -> Tensor:
    return dequantise_rows(tensor.format.removeprefix(PREFIX), tensor.parts["data"])


def load(weights: Sequence[StoredTensor], threads: int = 2) -> tuple[LoadedKernel, object]:
    formats = tuple(dict.fromkeys(w.format for w in weights))
    shape = OpShape(
        "linear", "float32", rows=sum(w.shape[0] for w in weights), cols=weights[0].shape[1], formats=formats
    )
    assert SPEC.serves(shape)
    kernel = SPEC.load(KernelSetup(shape, make_device("cpu"), "float32", dequantise, threads))
    assert kernel.pack is not None
    return kernel, kernel.pack(weights)


class TestConformance(KernelConformance):
    """Every kernel's suite, over Q8_0 blocks made from its matrices."""

    spec = "freetoken_kernels_llvm.spec:freetoken_kernels"

    @classmethod
    def _with_formats(cls, spec: object, shape: OpShape) -> OpShape:
        return evolve(shape, formats=("gguf.q8_0",))

    def store(self, tensor: StoredTensor) -> StoredTensor:
        matrix = tensor.parts["data"].float().view(-1, 32)
        scales = (matrix.abs().amax(1, keepdim=True) / 127).half()
        codes = (matrix / scales.float()).round().clamp(-127, 127).nan_to_num().to(torch.int8)
        raw = torch.cat((scales.flatten().view(torch.uint8).view(-1, 2), codes.view(torch.uint8)), 1)
        data = raw.view(tensor.shape[0], tensor.shape[1] // 32 * 34)
        return StoredTensor(tensor.name, "gguf.q8_0", tensor.shape, {"data": data}, tensor.file)

    def dequantise(self, tensor: StoredTensor) -> Tensor:
        return dequantise(tensor)


def test_every_block_type_has_a_form() -> None:
    """Oracle: the catalog of block types."""
    assert FORMS.keys() == BLOCK_TYPES.keys()


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 6, 7, 16, 33])
def test_every_block_type(name: str, tokens: int) -> None:
    """Odd numbers of rows too: 40 is two and a half tiles."""
    weight = blocks(name, 40, 512, seed=tokens)
    x = normal(tokens)(tokens, 512)
    kernel, packed = load([weight])
    expected = (x.double() @ dequantise(weight).double().T).float()
    size = expected.std()  # the types' scales lie far apart; a tolerance is for numbers around 1
    assert_close(kernel.call(x, packed) / size, expected / size, "float32", 512, name)


@pytest.mark.parametrize("names", [("q4_1", "q4_0"), ("q4_1", "q8_0"), ("q4_k", "q6_k"), ("q5_0", "q5_1", "q2_k")])
def test_a_matrix_stacked_from_several_types(names: tuple[str, ...]) -> None:
    """Rows of each type cross tiles: 24 is a tile and a half."""
    weights = [blocks(name, 24, 256, seed=i) for i, name in enumerate(names)]
    x = normal(1)(5, 256)
    kernel, packed = load(weights)
    expected = (x.double() @ torch.cat([dequantise(w) for w in weights]).double().T).float()
    size = expected.std()
    assert_close(kernel.call(x, packed) / size, expected / size, "float32", 256, str(names))


def test_a_row_is_the_same_bit_for_bit_in_any_batch_and_with_any_threads() -> None:
    """Property: nothing is added across rows or threads, so neither changes a sum; rows may lie apart."""
    weight, x = blocks("q4_1", 64, 320), normal(2)(23, 640)[:, :320]
    kernel, packed = load([weight])
    whole = kernel.call(x, packed)
    for threads in (1, 3):
        again, _ = load([weight], threads)
        assert torch.equal(again.call(x, packed), whole)
    for low in range(0, 22, 7):
        assert_close(kernel.call(x[low : low + 7], packed), whole[low : low + 7], "float32", 320, f"rows from {low}")


def test_a_long_chunk_of_a_wide_matrix_does_not_fill_the_stack() -> None:
    """2048 rows of 1536 blocks' sums are 12.6 MB, more than the stack of a thread. Oracle: some rows alone."""
    weight = blocks("q2_k", 16, 24_576)
    x = normal(4)(2048, 24_576)
    kernel, packed = load([weight])
    whole = kernel.call(x, packed)
    for row in (0, 1000, 2047):
        alone = kernel.call(x[row : row + 1], packed)
        assert_close(whole[row : row + 1] / alone.std(), alone / alone.std(), "float32", 24_576, f"row {row}")


def test_a_processor_without_half_conversions_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx avx2 fma\n")
    monkeypatch.setattr(probing, "CPUINFO", cpuinfo)
    monkeypatch.setattr(probing.platform, "machine", lambda: "x86_64")
    assert "f16c" in probe(Hardware()).reason


def test_a_library_that_cannot_be_loaded_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The deep probe runs in a child. Oracle: an llvmlite that ends its process, and the real one."""
    assert deep_probe(SPEC.deep_probe, Hardware())
    (tmp_path / "llvmlite").mkdir()
    (tmp_path / "llvmlite" / "__init__.py").write_text("import os; os._exit(11)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "exit code 11" in deep_probe(SPEC.deep_probe, Hardware()).reason


def test_a_broken_llvm_is_said_with_the_way_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "freetoken_kernels_llvm.machine", None)
    with pytest.raises(PluginError, match="linear=cpu-packed"):
        load([blocks("q4_0", 16, 32)])


def test_no_rows() -> None:
    kernel, packed = load([blocks("q4_0", 16, 32)])
    assert kernel.call(torch.empty(0, 32), packed).shape == (0, 16)


def test_tiles_hold_the_files_numbers() -> None:
    """Round trip: a product with the identity gives back every weight, exactly where there is no offset."""
    weight = blocks("q8_0", 32, 64)
    kernel, packed = load([weight])
    assert torch.equal(kernel.call(torch.eye(64), packed).T, dequantise(weight))


@pytest.mark.parametrize("shape", [(1, 2), (0, 0)])
def test_matrices_of_different_widths_are_refused(shape: tuple[int, int]) -> None:
    first, second = blocks("q4_0", 16, 64), blocks("q4_0", 16, 32)
    with pytest.raises(CheckpointError, match="one width"):
        pack_tiles([first, second] if shape[0] else [], form_of(("gguf.q4_0",)))
