"""The plugins that ship with the core. They come in by the hooks that strangers use; only their loading is listed."""

from __future__ import annotations

from collections.abc import Mapping

# Plugin name → module. Names are what `freetoken plugins` shows and what `--plugin no:NAME` blocks.
BUILTINS: Mapping[str, str] = {
    "attention-torch": "freetoken.builtin.attention_torch",
    "choose-first": "freetoken.builtin.choose_first",
    "commands": "freetoken.cli.commands",
    "core": "freetoken.config.plugin",
    "family-llama": "freetoken.models.llama",
    "family-mixtral": "freetoken.models.mixtral",
    "family-qwen2": "freetoken.models.qwen2",
    "family-qwen3": "freetoken.models.qwen3",
    "family-qwen3-5-moe": "freetoken.models.qwen3_5_moe",
    "family-qwen3-moe": "freetoken.models.qwen3_moe",
    "family-qwen3-next": "freetoken.models.qwen3_next",
    "kernels-cpu": "freetoken.builtin.kernels_cpu",
    "kernels-torch": "freetoken.builtin.kernels_torch",
    "moe-resident": "freetoken.builtin.moe_resident",
    "warmup-none": "freetoken.builtin.warmup_none",
    "weight-formats": "freetoken.builtin.weight_formats",
}
