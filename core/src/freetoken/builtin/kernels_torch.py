"""The kernels named ``torch``: the reference of every op, on any device. Imports torch only when one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import BankPart, KernelSetup, LoadedKernel
from freetoken.plugin.specs import KernelSpec
from freetoken.vocab.dtypes import COMPUTE_DTYPES, itemsize_bytes
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launch, LibraryCall, StepPoint
from freetoken.vocab.ops import OPS, OpShape, OpSpec
from freetoken.vocab.weight import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

DENSE = "dense"  # [rows, cols] in the compute dtype: an embedding and a linear of one matrix share it


def dense_bytes(shape: OpShape) -> int:
    """Bytes of one matrix of ``shape.rows × shape.cols`` in the compute dtype."""
    return shape.rows * shape.cols * itemsize_bytes(shape.dtype)


def expert_bytes(shape: OpShape) -> int:
    """Bytes of one expert: gate, up and down of ``intermediate × hidden``; ``cols`` is the hidden size."""
    return 3 * shape.intermediate * shape.cols * itemsize_bytes(shape.dtype)


def expert_layout(shape: OpShape) -> tuple[BankPart, ...]:
    """``gate_up [2I, H]``, gate's rows first, and ``down [H, I]``, in the compute dtype."""
    inner, hidden = shape.intermediate, shape.cols
    return (
        BankPart("gate_up", shape.dtype, (2 * inner, hidden)),
        BankPart("down", shape.dtype, (hidden, inner)),
    )


def load(setup: KernelSetup) -> LoadedKernel:
    """The reference of ``setup.shape.op``, with the packing it needs."""
    from freetoken.ops.reference import REFERENCE

    return LoadedKernel(call=REFERENCE[setup.shape.op], pack=_packer(setup))


def _packer(setup: KernelSetup) -> Callable[[Sequence[StoredTensor]], Any] | None:
    import torch

    from freetoken.ops.packing import pack_dense, pack_expert

    dtype: torch.dtype = getattr(torch, setup.dtype)
    device = setup.device.torch_name

    def matrix(tensors: Sequence[StoredTensor]) -> Tensor:
        return pack_dense(tensors, setup.dequantise, dtype, device)

    def expert(tensors: Sequence[StoredTensor]) -> Mapping[str, Tensor]:
        return pack_expert(tensors, setup.dequantise, dtype, device)

    return {"": None, "matrix": matrix, "expert": expert}[OPS[setup.shape.op].weights]


FEW_ROWS = 64
INDEX_32_ELEMENTS = 2**31 - 1  # torch computes addresses in tensors of more elements with 64 bits: another kernel


def embedding_launches(_: StepPoint, shape: OpShape, device: Device) -> tuple[Launch, ...]:
    """On a GPU the gather is torch's own: it picks among kernels by the number of tokens and loads each at its first
    call. A CPU has nothing to load."""
    return (embedding_call(shape, device),) if device.kind != "cpu" else ()


def embedding_call(shape: OpShape, device: Device) -> LibraryCall:
    """Gathers from a matrix of this width, of few rows where that picks the same kernels."""

    def sweep(tokens: int) -> None:
        import torch

        from freetoken.ops.embedding import embedding

        wide = shape.rows * shape.cols > INDEX_32_ELEMENTS
        rows = shape.rows if wide else min(shape.rows, FEW_ROWS)
        matrix = torch.empty((rows, shape.cols), dtype=getattr(torch, shape.dtype), device=device.torch_name)
        embedding(torch.zeros(tokens, dtype=torch.int64, device=device.torch_name), matrix)

    return LibraryCall(f"embedding {shape.rows}x{shape.cols} {shape.dtype}", sweep)


def _spec(op: OpSpec) -> KernelSpec:
    sizes = {"": lambda _: 0, "matrix": dense_bytes, "expert": expert_bytes}
    return KernelSpec(
        op=op.name,
        name="torch",
        summary=f"the reference of {op.name} in plain torch",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset(COMPUTE_DTYPES),
        formats=frozenset({"*"}),
        load=load,
        packing=DENSE if op.weights == "matrix" else "",
        packed_bytes=sizes[op.weights],
        bank_layout=expert_layout if op.weights == "expert" else None,
        launches=embedding_launches if op.name == "embedding" else None,
    )


@hookimpl
def freetoken_kernels() -> tuple[KernelSpec, ...]:
    return tuple(_spec(op) for op in OPS.values())
