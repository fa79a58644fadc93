"""The CPU kernels. Oracles: the torch reference (on weights that half precision holds), and float64 products."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from freetoken.builtin import kernels_cpu
from freetoken.builtin.kernels_cpu import FORMATS, freetoken_kernels, probe
from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.ops.rope import rope
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.testing.fakes import dequantise_plain, make_device, normal, stored
from freetoken.testing.kernels import KernelCase, KernelConformance
from freetoken.testing.tolerances import assert_close
from freetoken.vocab.errors import CheckpointError, PluginError
from freetoken.vocab.hardware import Hardware
from freetoken.vocab.ops import OpShape
from freetoken.vocab.weight import StoredTensor

pytestmark = pytest.mark.skipif(not probe(Hardware()), reason=probe(Hardware()).reason)
SPECS = {spec.op: spec for spec in freetoken_kernels()}


class TestCpuKernels(KernelConformance):
    """The reference gets weights that half precision holds exactly, so that only the products are compared."""

    spec = "freetoken.builtin.kernels_cpu:freetoken_kernels"

    def store(self, tensor: StoredTensor) -> StoredTensor:
        return stored(tensor.parts["data"].half(), tensor.name)

    def dequantise(self, tensor: StoredTensor) -> Tensor:
        return tensor.parts["data"].float()

    def test_packs_what_it_declared(self, case: KernelCase) -> None:
        """FBGEMM's form is opaque, so the declaration is compared with the growth of a process, below."""
        if case.spec.op == "linear":
            assert case.spec.packed_bytes(case.shape) >= 2 * case.shape.rows * case.shape.cols
        else:
            super().test_packs_what_it_declared(case)


def load(weights: Sequence[StoredTensor], op: str = "linear") -> tuple[LoadedKernel, object]:
    spec = SPECS[op]
    shape = OpShape(op, "float32", rows=sum(w.shape[0] for w in weights), cols=weights[0].shape[1])
    kernel = spec.load(KernelSetup(shape, make_device("cpu"), "float32", dequantise_plain))
    assert kernel.pack is not None
    return kernel, kernel.pack(weights)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 7), (17, 33), (129, 64), (64, 577)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 33])
def test_odd_sizes(rows: int, cols: int, tokens: int) -> None:
    """Oracle: a float64 product with the rounded weights."""
    randn = normal(rows * 1000 + cols)
    weight, x = (randn(rows, cols) * cols**-0.5).half().float(), randn(tokens, cols)
    kernel, packed = load([stored(weight)])
    expected = (x.double() @ weight.double().T).float()
    assert_close(kernel.call(x, packed), expected, "float32", cols, "an odd size")


def test_rows_of_a_wider_tensor() -> None:
    """Second way: the same rows, contiguous."""
    randn = normal(5)
    kernel, packed = load([stored(randn(24, 40))])
    wide = randn(6, 80)
    for view in (wide[:, 40:], wide[::2, :40], wide[:, ::2]):
        assert torch.equal(kernel.call(view, packed), kernel.call(view.contiguous(), packed))


def test_weights_are_rounded_and_nothing_else() -> None:
    """Property: against a float32 product the error is that of half precision's 2⁻¹² a weight."""
    randn = normal(8)
    weight, x = randn(64, 256), randn(4, 256)
    kernel, packed = load([stored(weight)])
    error = (kernel.call(x, packed) - x @ weight.T).abs()
    bound = 2**-12 * (x.abs() @ weight.abs().T) + 1e-4
    assert bool((error <= bound).all())
    assert float(error.max()) > 0


def test_embedding_rows_are_the_rounded_rows() -> None:
    weight = normal(9)(50, 12)
    kernel, packed = load([stored(weight)], "embedding")
    ids = torch.tensor([0, 49, 7, 7])
    assert torch.equal(kernel.call(ids, packed), weight.half().float()[ids])


def test_turns_are_of_the_positions_and_the_table_of_the_call() -> None:
    """The rotation keeps what it looked up last. Oracle: the torch reference, call by call."""
    randn = normal(3)
    call = (
        SPECS["rope"]
        .load(KernelSetup(OpShape("rope", "float32"), make_device("cpu"), "float32", dequantise_plain))
        .call
    )
    q, k = randn(3, 4, 8), randn(3, 2, 8)
    tables, places = [randn(20, 8), randn(20, 8)], [torch.tensor([0, 1, 2]), torch.tensor([5, 19, 7])]
    for table, place in ((0, 0), (0, 0), (1, 0), (1, 1), (0, 1), (0, 0)):
        found = call(q, k, places[place], tables[table])
        expected = rope(q, k, places[place], tables[table])
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, "float32", 8, f"table {table}, positions {place}")


def test_no_rows() -> None:
    """Oracle: the shapes of the torch reference."""
    none = torch.empty(0, dtype=torch.int64)
    setup = KernelSetup(OpShape("rope", "float32"), make_device("cpu"), "float32", dequantise_plain)
    q, k = SPECS["rope"].load(setup).call(torch.empty(0, 4, 8), torch.empty(0, 2, 8), none, torch.ones(20, 8))
    assert (q.shape, k.shape) == ((0, 4, 8), (0, 2, 8))
    assert SPECS["silu_and_mul"].load(setup).call(torch.empty(0, 6)).shape == (0, 3)


@pytest.mark.parametrize("value", [1e5, -1e5, float("inf"), float("nan")])
@pytest.mark.parametrize("op", ["linear", "embedding"])
def test_weights_beyond_half_are_refused(value: float, op: str) -> None:
    weight = torch.zeros(4, 4)
    weight[2, 1] = value
    with pytest.raises(CheckpointError, match="linear=torch"):
        load([stored(weight, "w.weight")], op)


def test_a_torch_without_fbgemm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(supported_engines=["qnnpack"]))
    with pytest.raises(PluginError, match="linear=torch"):
        load([stored(torch.zeros(2, 2))])


def test_other_processors_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_cpu.platform, "machine", lambda: "aarch64")
    assert "aarch64" in probe(Hardware()).reason
    monkeypatch.setattr(kernels_cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernels_cpu, "_cpu_flags", lambda: frozenset({"avx2"}))
    assert "f16c, fma" in probe(Hardware()).reason


def test_formats_are_known() -> None:
    """Oracle: the catalog of formats. float32 weights stay as they are."""
    known = {spec.name for spec in freetoken_weight_formats()}
    assert known >= FORMATS
    assert known - FORMATS == {"float32"}


@pytest.mark.parametrize(("rows", "cols"), [(1024, 1024), (3072, 576), (4097, 512)])
def test_memory_is_what_was_declared(rows: int, cols: int) -> None:
    """Oracle: how much a process grows by 16 matrices, once freed memory is given back."""
    code = f"""
import ctypes, resource, torch
from freetoken.builtin.kernels_cpu import freetoken_kernels
from freetoken.plugin.protocols import KernelSetup
from freetoken.testing.fakes import dequantise_plain, make_device, stored
from freetoken.vocab.ops import OpShape

def resident_bytes():
    ctypes.CDLL(None).malloc_trim(0)
    return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
shape = OpShape('linear', 'float32', rows={rows}, cols={cols})
spec = freetoken_kernels()[0]
kernel = spec.load(KernelSetup(shape, make_device('cpu'), 'float32', dequantise_plain))
kept = [kernel.pack([stored(torch.ones({rows}, {cols}))])]
before = resident_bytes()
kept += [kernel.pack([stored(torch.ones({rows}, {cols}))]) for _ in range(16)]
print((resident_bytes() - before) / 16 / spec.packed_bytes(shape))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(1.0, abs=0.05)
