"""How long, how many, how much at once: the plan's token limits, each with its reason. Pure integer arithmetic."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from freetoken.config.engine_options import CoreOptions
from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import ModelSpec
from freetoken.vocab.plan import Decision

CPU_PREFILL_TOKENS = 512
GPU_PREFILL_TOKENS = 8192
CPU_KV_TOKENS = 32768  # a CPU's pools are touched page by page, but nobody serves 32 full contexts from one


@frozen
class Limits:
    """The decided limits and why."""

    max_seq_tokens: int
    max_running_requests: int
    max_prefill_tokens: int
    decisions: tuple[Decision[Any], ...]


def decide_limits(options: CoreOptions, spec: ModelSpec, device: Device) -> Limits:
    """Raises ``RefusedPlan`` when more context is asked for than the model has."""
    longest = spec.max_context_tokens
    if options.max_seq_len is not None and options.max_seq_len > longest:
        raise RefusedPlan(
            f"--max-seq-len {options.max_seq_len}", f"the model's context is {longest} tokens",
            f"use at most {longest}",
        )  # fmt: skip
    seq = options.max_seq_len or longest
    why_seq = "asked for" if options.max_seq_len else "the model's context"
    default = CPU_PREFILL_TOKENS if device.kind == "cpu" else GPU_PREFILL_TOKENS
    prefill = min(options.max_prefill_tokens or default, seq)
    why_prefill = "asked for" if options.max_prefill_tokens else f"default on a {device.kind}"
    if prefill == seq and prefill < (options.max_prefill_tokens or default):
        why_prefill = "no longer than the longest request"
    return Limits(
        seq,
        options.max_running_requests,
        prefill,
        (
            Decision("max_seq_tokens", seq, why_seq),
            Decision("max_prefill_tokens", prefill, why_prefill),
            Decision("max_running_requests", options.max_running_requests, "--max-running-requests"),
        ),
    )


def decide_kv_tokens(
    options: CoreOptions, spec: ModelSpec, limits: Limits, page_tokens: int, device: Device, free_bytes: int
) -> Decision[int]:
    """Tokens of the KV cache: as asked, or all that could be used, as far as ``free_bytes`` allow.

    Raises ``RefusedPlan`` when not even one request of full length fits.
    """
    need = round_up(limits.max_seq_tokens, page_tokens) + page_tokens  # page 0 is scratch
    token_bytes = max(spec.kv_token_bytes, 1)
    fits = free_bytes // token_bytes // page_tokens * page_tokens
    if options.kv_tokens is not None:
        asked = round_up(options.kv_tokens, page_tokens) + page_tokens
        if asked > fits:
            raise _too_big(f"--kv-tokens {options.kv_tokens}", asked * token_bytes, free_bytes, fits)
        return Decision("kv_tokens", asked, "asked for")
    if fits < need:
        raise _too_big(f"KV for one request of {limits.max_seq_tokens} tokens", need * token_bytes, free_bytes, fits)
    useful = need * limits.max_running_requests
    if device.kind == "cpu":
        useful = min(useful, max(need, CPU_KV_TOKENS))
    if useful <= fits:
        return Decision("kv_tokens", useful, "all that the running requests could use")
    return Decision("kv_tokens", fits, "what the memory left allows")


def _too_big(asked: str, need_bytes: int, free_bytes: int, fits_tokens: int) -> RefusedPlan:
    from freetoken.vocab.units import format_bytes

    return RefusedPlan(
        asked,
        f"it needs {format_bytes(need_bytes)}, {format_bytes(max(free_bytes, 0))} are left after weights and work space"
        f" ({max(fits_tokens, 0)} tokens)",
        "lower --max-seq-len or --max-prefill-tokens, raise --memory-ratio, or use --moe-strategy offload where the"
        " model has experts",
    )


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` not below ``value``."""
    return -(-value // multiple) * multiple
