"""``router_topk``: the router's softmax and choice of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import memoised
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.availability import Availability
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.tiles import next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "freetoken_kernels_triton.router_topk_kernel:router_topk_kernel"
MAX_EXPERTS = 2048
LOWEST_KEY = {2: -(1 << 31), 4: -(1 << 62)}
"""By the bytes of a logit: an integer below every key of the kernel."""


def accepts(shape: OpShape) -> Availability:
    """A row of experts fits into registers, and there are at least K of them."""
    if not 0 < shape.top_k <= shape.experts <= MAX_EXPERTS:
        return Availability.no(f"{shape.top_k} of {shape.experts} experts; at most {MAX_EXPERTS} are served")
    return Availability.yes()


def launch(rows: int, stride: int, renormalise: bool, top_k: int, shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch: ``rows`` of logits, ``stride`` elements apart."""
    block = next_power_of_2(shape.experts)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("logits", TensorArg(shape.dtype)), ("weights", TensorArg("float32")), ("experts", TensorArg("int32")),
            ("logits_stride", stride), ("renormalise", int(renormalise)),
        ),
        constexprs=(
            ("E", shape.experts), ("K", top_k), ("BLOCK_E", block), ("BLOCK_K", next_power_of_2(top_k)),
            ("LOWEST", LOWEST_KEY[itemsize_bytes(shape.dtype)]),
        ),
        grid=(rows, 1, 1),
        num_warps=1 if block <= 512 else 4,
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    return (launch(point.tokens, shape.experts, True, shape.top_k, shape, device),)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda rows, stride, norm, top_k: launch(rows, stride, norm, top_k, shape, device))

    def router_topk(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """``logits [T, E]`` → ``(weights [T, K] f32, experts [T, K] i32)``."""
        rows = logits.shape[0]
        weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
        experts = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
        if rows:
            bound(rows, logits.stride(0), renormalise, top_k)(logits, weights, experts)
        return weights, experts

    return LoadedKernel(call=router_topk)
