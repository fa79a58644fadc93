"""``sample``: greedy, temperature, top-k, top-p, min-p and seed as per-row tensors, in two launches for any mixture."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from freetoken.ops.triton_launch import BoundLaunch, bind
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.tiles import blocks, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "freetoken_kernels_triton.sample_kernel:"
PART = 256
GROUP = 16
CANDIDATES = 2048
TOP_P_PARTS = 128
"""Under top-p alone the candidates are what reaches the 128th largest part maximum; if they lack mass, all are read."""


def num_parts(vocab: int) -> int:
    """Parts of a row, a multiple of 4 so that rows of scratch stay aligned."""
    return -(-blocks(vocab, PART) // 4) * 4


def step_launches(rows: int, stride: int, vocab: int) -> tuple[TritonLaunch, ...]:
    """The two launches for ``rows`` of logits, ``stride`` elements apart."""
    parts = num_parts(vocab)
    f32, i32, i64 = TensorArg("float32"), TensorArg("int32"), TensorArg("int64")
    sizes = (("V", vocab), ("PART", PART), ("PARTS", parts))
    scan = TritonLaunch(
        kernel=MODULE + "sample_scan_kernel",
        args=(
            ("logits", f32), ("temperature", f32), ("maxima", f32), ("masses", f32), ("logits_stride", stride),
        ),
        constexprs=(*sizes, ("GROUP", GROUP)),
        grid=(blocks(parts, GROUP), rows, 1),
        num_warps=8,
    )  # fmt: skip
    pick = TritonLaunch(
        kernel=MODULE + "sample_pick_kernel",
        args=(
            ("logits", f32), ("temperature", f32), ("top_k", i32), ("top_p", f32), ("min_p", f32), ("seeds", i64),
            ("steps", i64), ("maxima", f32), ("masses", f32), ("chosen_parts", i32), ("candidates", f32),
            ("candidate_ids", i32), ("out", i64), ("logits_stride", stride),
        ),
        constexprs=(
            *sizes, ("BLOCK_PARTS", next_power_of_2(parts)), ("GROUP", GROUP), ("CAP", CANDIDATES),
            ("GUESS", min(TOP_P_PARTS, blocks(vocab, PART))), ("BLOCK", 4096),
        ),
        grid=(rows, 1, 1),
        num_warps=8,
    )  # fmt: skip
    return scan, pick


def launches(point: StepPoint, shape: OpShape, _: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's rows of logits starts."""
    return step_launches(point.rows, shape.rows, shape.rows)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    vocab = setup.shape.rows
    parts = num_parts(vocab)

    @lru_cache(maxsize=1024)
    def bound(rows: int, stride: int) -> tuple[BoundLaunch, BoundLaunch]:
        scan, pick = step_launches(rows, stride, vocab)
        return bind(scan), bind(pick)

    def sample(
        logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, steps: Tensor
    ) -> Tensor:
        """``logits [R, V] f32``, the rest ``[R]`` → ``[R] i64``."""
        rows = logits.shape[0]
        out = torch.empty((rows,), dtype=torch.int64, device=logits.device)
        if not rows:
            return out
        maxima, masses = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device).unbind(0)
        candidates = torch.empty((rows, CANDIDATES), dtype=torch.float32, device=logits.device)
        ids = torch.empty((rows, CANDIDATES), dtype=torch.int32, device=logits.device)
        chosen = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
        scan, pick = bound(rows, logits.stride(0))
        scan(logits, temperature, maxima, masses)
        pick(logits, temperature, top_k, top_p, min_p, seeds, steps, maxima, masses, chosen, candidates, ids, out)
        return out

    return LoadedKernel(call=sample)
