"""A byte-level tokenizer without merges: every byte is a token, and three more mark chat turns."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from freetoken.models.chatml import TEMPLATE

END_OF_TEXT, END_OF_TURN, START_OF_TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, START_OF_TURN)
"""Tokens 256, 257 and 258."""


def write_tokenizer(directory: Path) -> None:
    """``tokenizer.json``, ``tokenizer_config.json`` with a ChatML template, and ``generation_config.json``."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, "bos_token_id": 256}))


def tiny_tokenizer() -> Tokenizer:
    """Tokens 0 to 255 are the letters of the byte-level alphabet in sorted order."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer
