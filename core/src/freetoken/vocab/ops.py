"""The named operations a model is made of: declared once, each with a torch reference in ``freetoken.ops``.

A kernel is an implementation of one of these. Shapes follow the legend in ``vocab.batch``.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class OpSpec:
    """One operation: its call signature, what it means, and whether it works on packed weights.

    ``weights`` is ``""`` for none, ``"matrix"`` when the kernel brings ``pack(tensors) -> packed`` for one matrix, and
    ``"expert"`` when it brings ``pack`` and ``bank_layout`` for one expert of a bank.
    """

    name: str
    signature: str
    meaning: str
    weights: str = ""
    in_place: tuple[str, ...] = ()


_OPS = (
    OpSpec("embedding", "(tokens [T] i64, packed) -> [T, H]", "rows of the embedding matrix, in the compute dtype",
           weights="matrix"),
    OpSpec("linear", "(x [T, I], packed) -> [T, O]", "x · Wᵀ, accumulated in float32", weights="matrix"),
    OpSpec("rms_norm", "(x [T, N], weight [N], eps) -> [T, N]",
           "x / sqrt(mean(x²) + eps) · weight, computed in float32 (Zhang & Sennrich 2019, arXiv:1910.07467)"),
    OpSpec("add_rms_norm", "(x [T, N], residual [T, N], weight [N], eps) -> (normed [T, N], summed [T, N])",
           "summed = x + residual in the compute dtype; normed = rms_norm(summed)"),
    OpSpec("gated_rms_norm", "(x [T, Hv, D], gate [T, Hv, D], weight [D], eps) -> [T, Hv, D]",
           "rms_norm(x) · silu(gate), computed in float32"),
    OpSpec("l2norm", "(x [T, Hk, D], eps) -> [T, Hk, D]", "x / sqrt(sum(x²) + eps) over D, computed in float32"),
    OpSpec("rope", "(q [T, Hq, D], k [T, Hkv, D], positions [T] i64, cos_sin [C, R] f32) -> (q, k)",
           "rotary embedding of the first R dims, halves layout: row p of cos_sin holds R/2 cosines, then R/2 sines "
           "(Su et al. 2021, arXiv:2104.09864); dims past R pass through"),
    OpSpec("silu_and_mul", "(x [T, 2I]) -> [T, I]", "silu(x[:, :I]) · x[:, I:]"),
    OpSpec("write_kv", "(k [T, Hkv, D], v [T, Hkv, D], k_pool [pages, P, Hkv, D], v_pool, kv_slots [T] i64)",
           "scatter new keys and values into the paged pools", in_place=("k_pool", "v_pool")),
    OpSpec("rope_write", "(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], q_weight [D] or None, k_weight [D] or None, "
           "eps, positions [T] i64, cos_sin [C, R] f32, k_pool, v_pool, kv_slots [T] i64) -> q [T, Hq, D]",
           "rms_norm of each query and key head where there are weights (cols > 0), then rope, then write_kv",
           in_place=("k_pool", "v_pool")),
    OpSpec("router_topk", "(logits [T, E], top_k, renormalise) -> (weights [T, K] f32, experts [T, K] i32)",
           "softmax in float32, the K largest (ties to the lower expert), renormalised to sum 1 where asked"),
    OpSpec("experts", "(hidden [T, H], weights [T, K] f32, slots [T, K] i32, bank) -> [T, H]",
           "Σ_k weights · down(silu(gate(h)) · up(h)) over the bank's chosen slots; rows of a bank are experts",
           weights="expert"),
    OpSpec("causal_conv", "(x [T, C], weight [C, W], state [slots, C, W-1] f32, query_starts [B+1] i32, "
           "state_slots [B] i64, prefix_lens [B] i32) -> [T, C]",
           "depthwise causal convolution with SiLU; a row whose prefix is 0 starts from zeros; the state becomes the "
           "last W-1 inputs", in_place=("state",)),
    OpSpec("gated_delta", "(q [T, Hk, Dk], k [T, Hk, Dk], v [T, Hv, Dv], decay [T, Hv] f32, beta [T, Hv] f32, "
           "state [slots, Hv, Dk, Dv] f32, query_starts, state_slots, prefix_lens) -> [T, Hv, Dv]",
           "S ← exp(decay)·S; S ← S + beta·k(v − kᵀS)ᵀ; out = qᵀS / sqrt(Dk) per head, q and k l2-normed already, "
           "each key head serving Hv/Hk value heads (Yang et al. 2024, arXiv:2412.06464)", in_place=("state",)),
    OpSpec("residual_add", "(x [T, N], residual [T, N], shared [T, N] or None, gate [T, 1] or None) -> [T, N]",
           "residual + (x + shared · sigmoid(gate)), rounded once; the last two are there where rows is 1"),
    OpSpec("sigmoid_gate", "(x [T, Hq, D], gate [T, Hq, D]) -> [T, Hq, D]", "x · sigmoid(gate), computed in float32"),
    OpSpec("delta_gates", "(ba [T, 2 Hv], rate [Hv] f32, dt_bias [Hv] f32) -> (beta [T, Hv] f32, decay [T, Hv] f32)",
           "beta = sigmoid(b); decay = rate · softplus(a + dt_bias), the logarithm of what is kept of a state"),
    OpSpec("delta_net", "(mixed [T, 2 Hk Dk + Hv Dv], ba [T, 2 Hv], rate [Hv] f32, dt_bias [Hv] f32, eps, state, "
           "query_starts, state_slots, prefix_lens) -> [T, Hv, Dv]",
           "l2norm of queries and keys, delta_gates, then gated_delta", in_place=("state",)),
    OpSpec("sample", "(logits [R, V] f32, temperature [R] f32, top_k [R] i32, top_p [R] f32, min_p [R] f32, "
           "seeds [R] i64, steps [R] i64) -> [R] i64",
           "one token a row: arg max where temperature is 0, else scaled, cut to top-k, then top-p, then min-p, and "
           "drawn with a generator keyed by (seed, step) alone, so that a row's draw does not depend on its batch"),
)  # fmt: skip

OPS: Mapping[str, OpSpec] = {op.name: op for op in _OPS}


@frozen
class OpShape:
    """The static sizes at which a model calls an op; a kernel may refuse some. Unused fields stay 0."""

    op: str
    dtype: str
    rows: int = 0  # O of a linear, V of an embedding, C of a convolution
    cols: int = 0  # I of a linear, N of a norm
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_dim: int = 0
    rotary_dim: int = 0
    experts: int = 0
    top_k: int = 0
    intermediate: int = 0
    width: int = 0  # of a convolution
    window: int = 0  # of an attention, 0 for none
    page_tokens: int = 0  # of an attention's pools
    formats: tuple[str, ...] = ()  # weight formats of the op's matrices, in order
