"""Compile every declared key of op kernels and attention for several cards, without a GPU; check their shared memory.

    python benchmarks/compile_all.py [--model NAME …] [--card NAME …] [--workers N] [--only OP …]

The models are the published dimensions of Qwen3-30B-A3B and Qwen3.6-35B-A3B. Exit code 1 when a key does not compile or
takes more shared memory than a block may have on that card. A summary by model and card comes last.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from freetoken.models import qwen3_5_moe, qwen3_moe
from freetoken.plugin.specs import KernelSpec, ModelFamilySpec
from freetoken.testing.launches import DEVICES
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Range, StepSpace
from freetoken.vocab.ops import OpShape
from freetoken.warmup.compile_worker import CompileResult, compile_requests
from freetoken.warmup.enumerate import enumerate_keys
from freetoken.warmup.keys import short
from freetoken.warmup.launch_space import attention_shape, build_launch_space

QWEN3_30B_A3B: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "use_sliding_window": False,
}  # fmt: skip

QWEN36_35B_A3B: Mapping[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    "text_config": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 248320, "hidden_act": "silu",
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "attention_bias": False, "attn_output_gate": True,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip

MODELS: Mapping[str, tuple[ModelFamilySpec, Mapping[str, Any]]] = {
    "qwen3-30b-a3b": (qwen3_moe.FAMILY, QWEN3_30B_A3B),
    "qwen3.6-35b-a3b": (qwen3_5_moe.FAMILY, QWEN36_35B_A3B),
}

PAGE_TOKENS = 16
SPACE = StepSpace(
    tokens=Range(1, 8192),
    sequences=Range(1, 64),
    chunk=Range(1, 8192),
    prefix=Range(0, 40959),
    context=Range(1, 40960),
    decode_sequences=Range(1, 64),
)


def installed(hook: str) -> tuple[Any, ...]:
    """What installed plugins offer through ``hook``, as far as it declares launches."""
    found: list[Any] = []
    for entry in entry_points(group="freetoken"):
        offer = getattr(entry.load(), hook, None)
        found += [spec for spec in (offer() if offer else ()) if spec.launches is not None]
    return tuple(found)


def installed_kernels() -> tuple[KernelSpec, ...]:
    """The kernels with declared launches that installed plugins offer."""
    return installed("freetoken_kernels")


def model_shapes(name: str, dtype: str = "bfloat16") -> tuple[OpShape, ...]:
    """Every op shape of a model, each once."""
    family, config = MODELS[name]
    parts = family.op_shapes(family.read_config(config, dtype), dtype)
    return tuple(dict.fromkeys(shape for _, shapes in parts for shape in shapes))


def declared(name: str, specs: Iterable[KernelSpec], device: Device, only: Iterable[str] = ()) -> Any:
    """The launch space of one model on one device: each op by the first kernel that serves it."""
    ops = []
    for shape in model_shapes(name):
        chosen = next((s for s in specs if s.op == shape.op and s.serves(shape)), None)
        if chosen is not None and (not only or shape.op in only):
            ops.append((f"{len(ops)}:{shape.op}", ((shape, chosen.launches),)))
    return build_launch_space(SPACE, ops, device)


def attention_launches(name: str, device: Device, dtype: str = "bfloat16") -> Any:
    """The launch space of a model's attention, by the first backend with declared launches that serves it."""
    family, config = MODELS[name]
    parts = []
    for group in family.read_config(config, dtype).attention:
        backend = next((b for b in installed("freetoken_attention_backends") if b.serves(group, dtype)), None)
        if backend is not None:
            parts.append((group.name, ((attention_shape(group, dtype, PAGE_TOKENS), backend.launches),)))
    return build_launch_space(SPACE, parts, device)


def compile_for(model: str, card: str, workers: int, only: Iterable[str]) -> tuple[CompileResult, ...]:
    """Compile one model's keys for one card; failures and excesses are printed as they come."""
    device = DEVICES[card]
    requests = enumerate_keys(declared(model, installed_kernels(), device, only)).requests(device)
    if not only or "attention" in only:
        requests += enumerate_keys(attention_launches(model, device)).requests(device)

    def show(result: CompileResult) -> None:
        note = result.error or f"{result.seconds:5.1f} s, {result.shared_memory_bytes:7d} B shared"
        if result.shared_memory_bytes > device.shared_memory_bytes:
            note += f": more than the {device.shared_memory_bytes} of {device.name}"
        print(f"{model:16} {card:8} {short(result.key):36} {note}", flush=True)

    return compile_requests(requests, workers, show).results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--card", action="append", choices=list(DEVICES))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", default=[])
    given = parser.parse_args()
    summary, bad, total = [], 0, 0
    for model in given.model or MODELS:
        for card in given.card or DEVICES:
            start, limit = time.perf_counter(), DEVICES[card].shared_memory_bytes
            results = compile_for(model, card, given.workers, given.only)
            wrong = sum(bool(r.error) or r.shared_memory_bytes > limit for r in results)
            bad, total = bad + wrong, total + len(results)
            largest = max((r.shared_memory_bytes for r in results), default=0)
            summary.append(
                f"{model:16} {card:8} sm_{DEVICES[card].arch:<3} {len(results):3} keys, {wrong} bad, at most "
                f"{largest} of {limit} B shared, {time.perf_counter() - start:.0f} s"
            )
    print("\n".join(summary))
    print(f"{total} keys, {bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
