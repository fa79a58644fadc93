"""The kinds of thing a plugin can offer, by the word the user reads and the hook that brings it."""

from __future__ import annotations

from attrs import frozen


@frozen
class OfferKind:
    """``word`` appears in messages, ``option`` is the flag that picks one (empty where the checkpoint decides)."""

    hook: str
    word: str
    option: str = ""


ATTENTION_BACKEND = OfferKind("freetoken_attention_backends", "attention backend", "--attention-backend")
MOE_STRATEGY = OfferKind("freetoken_moe_strategies", "MoE strategy", "--moe-strategy")
KERNEL = OfferKind("freetoken_kernels", "kernel", "--kernel")
WARMUP_POLICY = OfferKind("freetoken_warmup_policies", "warmup policy", "--warmup-policy")
MODEL_FAMILY = OfferKind("freetoken_model_families", "model family")
WEIGHT_FORMAT = OfferKind("freetoken_weight_formats", "weight format")
OPTIONS = OfferKind("freetoken_options", "options")

OFFER_KINDS = (
    ATTENTION_BACKEND,
    MOE_STRATEGY,
    KERNEL,
    WARMUP_POLICY,
    MODEL_FAMILY,
    WEIGHT_FORMAT,
    OPTIONS,
)
