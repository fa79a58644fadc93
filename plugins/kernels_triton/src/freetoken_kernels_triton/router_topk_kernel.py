"""Softmax over experts and the K largest, lower expert first among equals."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit(do_not_specialize=["rows", "logits_stride", "renormalise"])
def router_topk_kernel(
    logits,
    weights,
    experts,
    rows,
    logits_stride,
    renormalise,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """K rounds of arg max over a row in registers; K is small against E."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    expert = tl.arange(0, BLOCK_E)
    start = row.to(tl.int64) * logits_stride
    mask = (row[:, None] < rows) & (expert[None, :] < E)
    wait_for_predecessor(PDL)
    value = tl.load(logits + start[:, None] + expert[None, :], mask=mask, other=0.0).to(tl.float32)
    left = tl.where(expert[None, :] < E, value, float("-inf"))
    largest = tl.max(left, axis=1)
    mass = tl.sum(tl.exp(left - largest[:, None]), axis=1)
    rank = tl.arange(0, BLOCK_K)
    chosen_weight = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
    chosen_expert = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.int32)
    for k in tl.static_range(K):
        best = tl.max(left, axis=1)
        index = tl.min(tl.where(left == best[:, None], expert[None, :], BLOCK_E), axis=1)
        index = tl.minimum(index, E - 1)  # a row of NaNs equals nothing: keep the id inside the bank
        weight = tl.exp(best - largest) / mass
        chosen_weight = tl.where(rank[None, :] == k, weight[:, None], chosen_weight)
        chosen_expert = tl.where(rank[None, :] == k, index[:, None], chosen_expert)
        left = tl.where(expert[None, :] == index[:, None], float("-inf"), left)
    total = tl.sum(chosen_weight, axis=1)
    chosen_weight = chosen_weight * tl.where(renormalise != 0, 1.0 / total, 1.0)[:, None]
    out = row.to(tl.int64)[:, None] * K + rank[None, :]
    out_mask = (row[:, None] < rows) & (rank[None, :] < K)
    tl.store(weights + out, chosen_weight, mask=out_mask)
    tl.store(experts + out, chosen_expert, mask=out_mask)
