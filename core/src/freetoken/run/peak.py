"""What the largest step takes while it runs: measured before the caches are sized."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from freetoken.kv.pool import CachePools
from freetoken.memory.measure import PeakTracker
from freetoken.plugin.protocols import AttentionBackend, Model, MoEStrategy
from freetoken.run.runner import ModelRunner
from freetoken.run.sampler import Sampler
from freetoken.run.scratch import ScratchForward
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.plan import Plan, Sizing

_log = logging.getLogger("freetoken.engine")


def measure_peak(
    plan: Plan,
    model: Model,
    attention: Mapping[str, AttentionBackend],
    moe: MoEStrategy | None,
    sampler: Sampler,
    layers: Sequence[int],
) -> int | None:
    """Bytes, from a step of the largest chunk at the longest context; ``None`` on a CPU, where the claims stand.

    ``layers`` are one of each kind: a step's activations do not add up over layers, so they show the peak.
    """
    if plan.device.kind == "cpu":
        return None
    rows = 2 if plan.model.state_slot_bytes else 0
    pools = CachePools(plan.model.caches, 2, plan.page_tokens, rows, plan.device.torch_name)
    scratch = ScratchForward(ModelRunner(model, attention, moe, pools), sampler, layers, plan.page_tokens)
    with PeakTracker(plan.device) as tracker:
        scratch.run(_largest(plan, plan.max_prefill_tokens))
    torch.cuda.empty_cache()
    return tracker.extra_bytes


def take_step_memory(plan: Plan, sizing: Sizing, scratch: ScratchForward, window_tokens: int = 0) -> int:
    """Run the largest step once, and the largest window where prompts pass in windows, so that torch's allocator holds
    the memory that sizing left for them.

    Otherwise the first prompt of each new length would wait for the driver to hand it out (7 to 8 ms for 700 to 5400
    tokens on an H200). Returns the window that fits: ``window_tokens``, or fewer where memory runs out.
    """
    if plan.device.kind == "cpu":
        return window_tokens
    chunk = sizing.max_prefill_tokens
    scratch.run(_largest(plan, chunk))
    planned = chunks = min(window_tokens, plan.max_seq_tokens) // chunk
    while chunks > 1:
        try:
            scratch.run_window(chunk, chunks)
            break
        except torch.OutOfMemoryError:
            chunks //= 2
        torch.cuda.empty_cache()  # behind the handler: inside it, the traceback still holds the window's tensors
    if chunks == planned:
        return window_tokens
    fits = chunks * chunk if chunks > 1 else 0
    _log.warning("a window of %d tokens of a prompt ran out of memory; the largest is now %d", planned * chunk, fits)
    return fits


def _largest(plan: Plan, tokens: int) -> StepPoint:
    return StepPoint(tokens, 1, tokens, plan.max_seq_tokens, 1, decode=False)
