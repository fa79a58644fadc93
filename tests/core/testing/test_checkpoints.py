"""Written checkpoints and their tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from freetoken.models import llama, qwen3_moe
from freetoken.serve.text.tokenizer import TextTokenizer
from freetoken.testing.checkpoints import write_tiny

TEXT = "naïve 東京 🙂\n"


def test_the_tokenizer_is_bytes(tmp_path: Path) -> None:
    """Round trip, and transformers reads the same tokens."""
    write_tiny(llama.FAMILY, tmp_path)
    tokenizer = TextTokenizer.from_directory(tmp_path)
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) == len(TEXT.encode())
    assert tokenizer.decode(tokens) == TEXT
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"] == tokens
    assert tokenizer.encode("<|endoftext|><|im_end|><|im_start|>") == [256, 257, 258]


def test_the_chat_template_marks_turns(tmp_path: Path) -> None:
    """Oracle: transformers renders it."""
    write_tiny(llama.FAMILY, tmp_path)
    rendered = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_one_seed_gives_one_model(tmp_path: Path) -> None:
    """Property: the same bytes for the same seed, others for another."""
    files = [
        (write_tiny(qwen3_moe.FAMILY, tmp_path / str(i), seed=seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((0, 0, 1))
    ]
    assert files[0] == files[1] != files[2]
    assert json.loads((tmp_path / "0" / "config.json").read_text()) == qwen3_moe.FAMILY.tiny()
