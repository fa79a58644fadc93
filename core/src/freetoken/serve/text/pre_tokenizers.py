"""How byte-level vocabularies cut text into words before merging: the rules behind GGUF's ``tokenizer.ggml.pre``.

GGUF stores a name where ``tokenizer.json`` stores the rule. Each rule here is that of the published tokenizer which the
name stands for; where a name stands for no single one (``default``), it is what the GGUF reference reader does.
"""

from __future__ import annotations

from attrs import frozen
from tokenizers import Regex, normalizers, pre_tokenizers

from freetoken.vocab.errors import CheckpointError

_WORD_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER_THEN_LOWER = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{tail}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{tail}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WORD_BREAKS}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WORD_BREAKS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_WORD_BREAKS}"
)
_TEKKEN = _UPPER_THEN_LOWER.replace("{tail}", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WORD_BREAKS}"
_GPT4O = (
    _UPPER_THEN_LOWER.replace("{tail}", f"{_CONTRACTIONS}?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WORD_BREAKS}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_WORD_BREAKS}"
)


@frozen
class PreTokenizer:
    """``splits`` are applied in turn, each to the pieces the last one left. ``nfc`` composes characters first.

    ``ignore_merges`` takes a word that is a token whole. ``add_bos`` is what holds where the file does not say.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )


_GPT2_RULE = PreTokenizer((_GPT2,))
_DIGITS_RULE = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_RULE = PreTokenizer((_QWEN2,), nfc=True)
_GPT4O_RULE = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "pixtral": _LLAMA3_RULE,
    "lfm2": _LLAMA3_RULE,
    "smaug-bpe": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "glm4": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "megrez": _QWEN2_RULE,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O_RULE,
    "llama4": _GPT4O_RULE,
    "minimax-m2": _GPT4O_RULE,
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}


def pre_tokenizer_named(name: str | None) -> PreTokenizer:
    """The rule ``name`` stands for; ``CheckpointError`` for an unknown name or none: a guess would garble prompts."""
    if name is None:
        raise CheckpointError(
            "tokenizer.ggml.pre",
            "the GGUF file does not say how its vocabulary cuts text into words",
            "convert the model again with a current converter, or set the key with gguf-new-metadata --pre-tokenizer",
        )
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre = {name!r}",
            f"this pre-tokenizer is not implemented; known are {', '.join(sorted(PRE_TOKENIZERS))}",
            "serve the model from its original files (safetensors with tokenizer.json)",
        )
    return PRE_TOKENIZERS[name]
