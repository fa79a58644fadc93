"""The plugin: one ``KernelSpec`` named ``triton`` for each op these kernels implement. Imports no library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import KernelSpec
from freetoken.vocab.availability import Availability
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton import (
    add_rms_norm,
    causal_conv,
    delta_gates,
    delta_net,
    experts,
    gated_delta,
    gated_rms_norm,
    l2norm,
    linear,
    residual_add,
    rms_norm,
    rope,
    rope_write,
    router_topk,
    sample,
    sigmoid_gate,
    silu_and_mul,
    write_kv,
)
from freetoken_kernels_triton.probe import probe
from freetoken_kernels_triton.tiles import row_multiple

DEEP_PROBE = "freetoken_kernels_triton.probe:deep_probe"
FLOATS = frozenset({"float32", "bfloat16", "float16"})
DENSE = "dense"
"""The core's packing of plain matrices: ``[rows, cols]`` in the compute dtype, so that tied embeddings are shared."""


def row_lengths(*lengths: Callable[[OpShape], int]) -> Callable[[OpShape], Availability]:
    """Refuses shapes whose rows do not lie at multiples of 16 bytes."""

    def accepts(shape: OpShape) -> Availability:
        for length in lengths:
            if length(shape) <= 0 or length(shape) % row_multiple(shape.dtype):
                return Availability.no(f"rows of {length(shape)} {shape.dtype} values are not a multiple of 16 bytes")
        return Availability.yes()

    return accepts


def _spec(module: Any, summary: str, **more: Any) -> KernelSpec:
    op = module.__name__.rpartition(".")[2]
    given = {
        "devices": frozenset({"cuda"}),
        "dtypes": FLOATS,
        "priority": 10,
        "probe": probe,
        "deep_probe": DEEP_PROBE,
        "launches": module.launches,
        "load": module.load,
    }
    return KernelSpec(op=op, name="triton", summary=summary, **{**given, **more})


def _dense_bytes(shape: OpShape) -> int:
    return shape.rows * shape.cols * itemsize_bytes(shape.dtype)


SPECS = (
    _spec(rms_norm, "RMS norm; one compiled kernel for every length", accepts=row_lengths(lambda s: s.cols)),
    _spec(add_rms_norm, "residual addition and RMS norm in one pass", accepts=row_lengths(lambda s: s.cols)),
    _spec(gated_rms_norm, "RMS norm times SiLU of a gate", accepts=row_lengths(gated_rms_norm.norm_dim)),
    _spec(l2norm, "L2 norm; one compiled kernel for every length", accepts=row_lengths(l2norm.norm_dim)),
    _spec(rope, "rotary embedding of queries and keys in one launch", accepts=rope.accepts),
    _spec(rope_write, "head norms, rotation and write into pages in one launch", accepts=rope_write.accepts),
    _spec(silu_and_mul, "SiLU-and-multiply", accepts=row_lengths(silu_and_mul.width)),
    _spec(residual_add, "residual addition with a gated shared expert", accepts=row_lengths(lambda s: s.cols)),
    _spec(sigmoid_gate, "attention's output gate", accepts=row_lengths(lambda s: s.cols)),
    _spec(delta_gates, "strength and decay of the gated delta rule", accepts=row_lengths(lambda s: 2 * s.kv_heads)),
    _spec(write_kv, "scatter of keys and values into pages", accepts=write_kv.accepts),
    _spec(router_topk, "router softmax and top-k", accepts=router_topk.accepts),
    _spec(
        experts,
        "grouped expert products: memory-bound decode, tensor-core prefill",
        accepts=experts.accepts,
        formats=frozenset({"*"}),
        packed_bytes=experts.packed_bytes,
        bank_layout=experts.bank_layout,
    ),
    _spec(causal_conv, "varlen causal convolution with state", accepts=causal_conv.accepts),
    _spec(delta_net, "the gated delta net from convolution to output norm", accepts=delta_net.accepts),
    _spec(gated_delta, "gated delta rule: chunked prefill, recurrent decode", accepts=gated_delta.accepts),
    _spec(sample, "temperature, top-k, top-p, min-p and seed in one kernel", dtypes=frozenset({"float32"})),
    _spec(
        linear,
        "products of up to 16 rows at memory speed, more by the library",
        dtypes=frozenset({"bfloat16", "float16"}),
        formats=frozenset({"*"}),
        packing=DENSE,
        packed_bytes=_dense_bytes,
        accepts=linear.accepts,
    ),
)


@hookimpl
def freetoken_kernels() -> tuple[KernelSpec, ...]:
    return SPECS
