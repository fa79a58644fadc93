"""Every built-in family under the conformance suite, with transformers in float32 as the oracle."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from freetoken.models import llama, mixtral, qwen2, qwen3, qwen3_5_moe, qwen3_moe, qwen3_next
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.family import FamilyConformance, Oracle
from freetoken.testing.transformers_oracle import transformers_oracle

_oracle = lru_cache(maxsize=1)(transformers_oracle)


class AgainstTransformers(FamilyConformance):
    config: dict[str, object] = {}

    def write(self, directory: Path) -> None:
        write_tiny(self.family, directory, config={**self.family.tiny(), **self.config})

    def oracle(self, directory: Path) -> Oracle:
        return _oracle(directory, self.family.architectures[0])


class TestLlama(AgainstTransformers):
    family = llama.FAMILY


class TestLlama3(AgainstTransformers):
    """Scaled rotary embedding, tied head, biases."""

    family = llama.FAMILY
    config = {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": True,
        "attention_bias": True,
    }


class TestQwen2(AgainstTransformers):
    family = qwen2.FAMILY


class TestQwen3(AgainstTransformers):
    family = qwen3.FAMILY


class TestMixtral(AgainstTransformers):
    family = mixtral.FAMILY


class TestQwen3Moe(AgainstTransformers):
    family = qwen3_moe.FAMILY


class TestQwen3MoeWithDenseLayers(AgainstTransformers):
    """A dense layer between, weights of chosen experts as the softmax gives them."""

    family = qwen3_moe.FAMILY
    config = {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False}


class TestQwen35Moe(AgainstTransformers):
    """The text part of a multimodal checkpoint; the smallest vision tower, for the oracle's sake."""

    family = qwen3_5_moe.FAMILY
    config = {
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 128,
            "num_position_embeddings": 16,
        }
    }


class TestQwen3Next(AgainstTransformers):
    family = qwen3_next.FAMILY
