"""What every kernel must do, as a test class that a plugin's author subclasses.

    class TestMine(KernelConformance):
        spec = "my_package.plugin:freetoken_kernels"

The oracle is the op's torch reference, run in float32 on the CPU on the same (rounded) inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from freetoken.ops.packing import pack_dense, pack_expert
from freetoken.ops.reference import REFERENCE
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.plugin.specs import KernelSpec
from freetoken.testing.fakes import PLAIN_FORMATS, dequantise_plain, device_kinds, device_marks, load_specs, make_device
from freetoken.testing.op_cases import OP_CASES, PACKED, Inputs
from freetoken.testing.tolerances import assert_close
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.ops import OPS, OpShape
from freetoken.vocab.weight import StoredTensor

DRAWS_APART = 0.02  # share of rows whose draw may lie on the other side of a boundary, for another order of summation


@frozen
class KernelCase:
    """One kernel at one shape on one kind of device."""

    spec: KernelSpec = field(eq=False)
    device: str
    shape: OpShape

    def __str__(self) -> str:
        sizes = [f"{n}{v}" for n in _SIZES if (v := getattr(self.shape, n))]
        return "-".join((self.spec.name, self.spec.op, self.device, self.shape.dtype, *sizes))


_SIZES = ("rows", "cols", "q_heads", "kv_heads", "head_dim", "v_dim", "rotary_dim", "experts", "top_k", "intermediate",
          "width")  # fmt: skip


class KernelConformance:
    """Subclass as ``TestSomething`` and set ``spec`` to a ``KernelSpec``, several, or the hook implementation.

    ``devices``, ``dtypes`` and ``ops``, where set, narrow what the specs declare. A kernel that takes other than plain
    formats overrides ``store`` (a float32 matrix in one of its formats) and ``dequantise``.
    """

    spec: str
    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            cases = [pytest.param(c, id=str(c), marks=device_marks(c.device)) for c in self.cases()]
            metafunc.parametrize("case", cases)

    @classmethod
    def cases(cls) -> list[KernelCase]:
        """Every declared kernel, device and dtype at each shape that it serves; at least one shape each."""
        found = []
        for spec in load_specs(cls.spec):
            if cls.ops is not None and spec.op not in cls.ops:
                continue
            for device, dtype in product(cls.devices or device_kinds(spec.devices), cls.dtypes or sorted(spec.dtypes)):
                shapes = [cls._with_formats(spec, s) for s in OP_CASES[spec.op].shapes(spec.op, dtype)]
                served = [KernelCase(spec, device, s) for s in shapes if spec.serves(s)]
                assert served, f"{spec.name} serves none of the shapes {shapes} of {spec.op}"
                found += served
        return found

    def store(self, tensor: StoredTensor) -> StoredTensor:
        """A plain stored matrix in the format to test; plain as it is."""
        return tensor

    def dequantise(self, tensor: StoredTensor) -> Tensor:
        """The reference dequantisation of what ``store`` made."""
        return dequantise_plain(tensor)

    # ------------------------------------------------------------------------------------------------ the tests

    def test_equals_the_reference(self, case: KernelCase) -> None:
        """Oracle: the torch reference in float32, for several numbers of tokens, in-place arguments included."""
        kernel = self._load(case)
        for tokens in OP_CASES[case.spec.op].tokens:
            inputs = self._inputs(case, tokens)
            args = self._args(case, kernel, inputs)
            expected_args = self._reference_args(case, inputs)
            before = [copy.deepcopy(a) for a in args]
            expected = REFERENCE[case.spec.op](*expected_args)
            actual = kernel.call(*args)
            what = f"{case.spec.op} of {tokens} tokens"
            if case.spec.op == "sample":
                assert_same_draws(actual, expected, args, what)
            else:
                _compare(actual, expected, case.shape.dtype, inputs.reduction, what)
            self._check_arguments(case, inputs, args, before, expected_args, what)

    def test_a_row_does_not_depend_on_its_batch(self, case: KernelCase) -> None:
        """Oracle: the same row alone. Ops whose rows share a state or a pool are left to the reference."""
        if case.spec.op in ("write_kv", "rope_write", "causal_conv", "gated_delta", "delta_net"):
            pytest.skip("rows share a state or a pool")
        kernel = self._load(case)
        inputs = self._inputs(case, 17)
        args = self._args(case, kernel, inputs)
        whole = _tensors(kernel.call(*args))
        for row in (0, 9, 16):
            # Copies, since a kernel may rely on addresses that are multiples of 16.
            alone = [a[row : row + 1].clone() if isinstance(a, Tensor) and a.shape[:1] == (17,) else a for a in args]
            if case.spec.op == "rope":
                alone[3] = args[3]
            for got, want in zip(_tensors(kernel.call(*alone)), whole, strict=True):
                if case.spec.op == "sample":
                    assert torch.equal(got, want[row : row + 1]), f"row {row} drew another token alone"
                else:
                    assert_close(got, want[row : row + 1], case.shape.dtype, inputs.reduction, f"row {row} alone")

    def test_packs_what_it_declared(self, case: KernelCase) -> None:
        """Oracle: the bytes of what ``pack`` made against ``packed_bytes`` and ``bank_layout``; and packing copies."""
        kind = OPS[case.spec.op].weights
        kernel = self._load(case)
        if not kind:
            assert kernel.pack is None, f"{case.spec.op} has no weights to pack"
            return
        assert kernel.pack is not None, f"{case.spec.op} works on packed weights"
        inputs = self._inputs(case, 1)
        weights = inputs.weights or inputs.experts[0]
        packed = kernel.pack(weights)
        parts = _parts(packed)
        size = sum(p.numel() * p.element_size() for p in parts)
        assert size == case.spec.packed_bytes(case.shape), f"declared {case.spec.packed_bytes(case.shape)}, took {size}"
        stored = {t.untyped_storage().data_ptr() for w in weights for t in w.parts.values()}
        assert not stored & {p.untyped_storage().data_ptr() for p in parts}, "a packed part is a view of the checkpoint"
        if kind == "expert":
            assert case.spec.bank_layout is not None, "an expert kernel declares how its bank is laid out"
            layout = case.spec.bank_layout(case.shape)
            assert {p.name: (p.dtype, p.shape) for p in layout} == {
                name: (str(p.dtype).removeprefix("torch."), tuple(p.shape)) for name, p in packed.items()
            }
            declared = sum(torch.Size(p.shape).numel() * itemsize_bytes(p.dtype) for p in layout)
            assert declared == case.spec.packed_bytes(case.shape)

    def test_undeclared_is_refused(self, case: KernelCase) -> None:
        """Oracle: the spec's own facts. What it does not declare, ``serves`` refuses with a reason."""
        spec = case.spec
        assert spec.serves(case.shape), spec.serves(case.shape).reason
        for dtype in {"float32", "bfloat16", "float16", "float64"} - spec.dtypes:
            assert dtype in spec.serves(evolve(case.shape, dtype=dtype)).reason
        if OPS[spec.op].weights and "*" not in spec.formats:
            assert "nobody's format" in spec.serves(evolve(case.shape, formats=("nobody's format",))).reason

    # ------------------------------------------------------------------------------------------------ the parts

    @classmethod
    def _with_formats(cls, spec: KernelSpec, shape: OpShape) -> OpShape:
        if not OPS[shape.op].weights:
            return shape
        if "*" in spec.formats or shape.dtype in spec.formats:
            return evolve(shape, formats=(shape.dtype,))
        other = sorted(set(spec.formats) - set(PLAIN_FORMATS)) or sorted(spec.formats)
        return evolve(shape, formats=(other[0],))

    def _load(self, case: KernelCase) -> LoadedKernel:
        setup = KernelSetup(case.shape, make_device(case.device), case.shape.dtype, self.dequantise)
        return case.spec.load(setup)

    def _inputs(self, case: KernelCase, tokens: int) -> Inputs:
        made = OP_CASES[case.spec.op].make(case.shape, tokens, case.device)
        experts = tuple(tuple(self.store(w) for w in expert) for expert in made.experts)
        return evolve(made, weights=tuple(self.store(w) for w in made.weights), experts=experts)

    def _args(self, case: KernelCase, kernel: LoadedKernel, inputs: Inputs) -> list[Any]:
        if not OPS[case.spec.op].weights:
            return list(inputs.args)
        assert kernel.pack is not None, f"{case.spec.op} works on packed weights"
        packed = _bank(kernel.pack, inputs) if inputs.experts else kernel.pack(inputs.weights)
        return [packed if a is PACKED else a for a in inputs.args]

    def _reference_args(self, case: KernelCase, inputs: Inputs) -> list[Any]:
        """The same arguments in float32 on the CPU; tensors that share memory are copied apart."""
        packed: Any = None
        if inputs.experts:
            packed = _bank(lambda w: pack_expert(w, self.dequantise, torch.float32, "cpu"), inputs)
        elif inputs.weights:
            packed = pack_dense(inputs.weights, self.dequantise, torch.float32, "cpu")
        return [packed if a is PACKED else _wide_copy(a) for a in inputs.args]

    def _check_arguments(
        self, case: KernelCase, inputs: Inputs, args: list[Any], before: list[Any], expected: list[Any], what: str
    ) -> None:
        """In-place arguments became what the reference made of them; the others are as they were."""
        written = _in_place_positions(case.spec.op)
        for place, (arg, old, new) in enumerate(zip(args, before, expected, strict=True)):
            if not isinstance(arg, Tensor):
                continue
            if place in written:
                dtype = "float32" if arg.dtype == torch.float32 else case.shape.dtype
                _compare(arg, new, _looser(dtype, case.shape.dtype), inputs.reduction, f"{what}, argument {place}")
            else:
                assert torch.equal(arg, old), f"{what} wrote its argument {place}"


def assert_same_draws(actual: Tensor, expected: Tensor, args: list[Any], what: str) -> None:
    """Greedy rows are equal; of the others at most ``DRAWS_APART`` differ, one of a small batch at most."""
    assert actual.dtype == torch.int64, f"{what}: tokens are {actual.dtype}, not int64"
    differs = actual.cpu() != expected.cpu()
    greedy = args[1].cpu() == 0
    assert not differs[greedy].any(), f"{what}: greedy rows {differs.logical_and(greedy).nonzero().flatten().tolist()}"
    allowed = max(1, int(DRAWS_APART * len(differs))) if len(differs) > 1 else 0
    assert int(differs.sum()) <= allowed, f"{what}: {int(differs.sum())} of {len(differs)} rows drew another token"


def _bank(pack: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
    packed = [pack(expert) for expert in inputs.experts]
    return {name: torch.stack([p[name] for p in packed]) for name in packed[0]}


def _wide_copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.float().clone() if value.is_floating_point() else value.clone()


def _tensors(result: Any) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _compare(actual: Any, expected: Any, dtype: str, reduction: int, what: str) -> None:
    got, want = _tensors(actual), _tensors(expected)
    assert len(got) == len(want), f"{what}: {len(got)} results, expected {len(want)}"
    for n, (a, e) in enumerate(zip(got, want, strict=True)):
        if e.is_floating_point():
            assert a.dtype in (getattr(torch, dtype), torch.float32), f"{what}: result {n} is {a.dtype}"
            assert_close(a, e, dtype, reduction, f"{what}, result {n}")
        else:
            assert a.dtype == e.dtype, f"{what}: result {n} is {a.dtype}, not {e.dtype}"
            assert torch.equal(a.cpu(), e), f"{what}: result {n} differs"


def _looser(own: str, computed: str) -> str:
    """A float32 state that a rounded input was added to is only as exact as that input's dtype."""
    return computed if itemsize_bytes(computed) < itemsize_bytes(own) else own


def _parts(packed: Any) -> list[Tensor]:
    """Every tensor of whatever ``pack`` made: a tensor, a mapping, a sequence, or an object of tensors."""
    if isinstance(packed, Tensor):
        return [packed]
    if isinstance(packed, dict):
        return [t for value in packed.values() for t in _parts(value)]
    if isinstance(packed, list | tuple):
        return [t for value in packed for t in _parts(value)]
    held = {name: getattr(packed, name) for name in getattr(type(packed), "__slots__", ()) if hasattr(packed, name)}
    held.update(getattr(packed, "__dict__", {}))
    return [t for value in held.values() for t in _parts(value)]


def _in_place_positions(op: str) -> frozenset[int]:
    """Where an op's in-place arguments stand, from its signature."""
    spec = OPS[op]
    names = [part.strip().split(" ")[0] for part in _split_arguments(spec.signature)]
    return frozenset(names.index(name) for name in spec.in_place)


def _split_arguments(signature: str) -> list[str]:
    """The arguments of ``(a [T, H], b) -> …``; commas inside brackets do not separate."""
    inside, depth, parts = signature[1 : signature.index(") ->")] if ") ->" in signature else signature[1:-1], 0, [""]
    for char in inside:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
