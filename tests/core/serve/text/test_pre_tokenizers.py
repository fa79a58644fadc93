"""The word-splitting rules against transformers' table and against Python's ``regex`` engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.serve.text.pre_tokenizers import PRE_TOKENIZERS, pre_tokenizer_named
from freetoken.serve.text.token_bytes import byte_level
from freetoken.vocab.errors import CheckpointError

TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=40) | st.text(
    "aZé 1٣\n\r\t'sL.,中e\u0301", max_size=40
)


def words(name: str, text: str) -> list[bytes]:
    return [byte_level(piece) for piece, _ in pre_tokenizer_named(name).pre_tokenizer().pre_tokenize_str(text)]


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_words_are_those_of_the_regex_module(name: str, text: str) -> None:
    """Second implementation: each pattern applied in turn by another regular-expression engine."""
    regex = pytest.importorskip("regex")
    pieces = [text] if text else []
    for pattern in PRE_TOKENIZERS[name].splits:
        pieces = [part for piece in pieces for part in _isolated(regex.compile(pattern, regex.V0), piece)]
    assert words(name, text) == [piece.encode() for piece in pieces]


def _isolated(pattern, text: str) -> list[str]:  # type: ignore[no-untyped-def]
    parts, at = [], 0
    for match in pattern.finditer(text):
        parts += [text[at : match.start()], match[0]]
        at = match.end()
    return [part for part in [*parts, text[at:]] if part]


def test_words_are_those_of_transformers(nasty_texts: tuple[str, ...]) -> None:
    """transformers' table of GGUF splits, for every name that both tables have."""
    pytest.importorskip("transformers")
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    from tokenizers import Regex, pre_tokenizers

    shared = sorted(set(mapping.GGUF_PRE_TOKENIZER_SPLITS) & set(PRE_TOKENIZERS))
    assert {"llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"} <= set(shared)
    for name in shared:
        theirs = pre_tokenizers.Split(Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
        for text in nasty_texts:
            expected = [piece.encode() for piece, _ in theirs.pre_tokenize_str(text)]
            assert words(name, text) == expected, (name, text)


def test_gpt2_words_are_those_of_the_byte_level_pre_tokenizer(nasty_texts: tuple[str, ...]) -> None:
    """Oracle: the expression built into tokenizers' ``ByteLevel``, alone and after ``Digits``."""
    from tokenizers import pre_tokenizers

    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    for text in nasty_texts:
        for name, theirs in (("gpt-2", plain), ("smollm", digits)):
            assert words(name, text) == [byte_level(piece) for piece, _ in theirs.pre_tokenize_str(text)], (name, text)


@pytest.mark.parametrize("name", ["mystery", "", None])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre") as caught:
        pre_tokenizer_named(name)
    assert caught.value.refusal.fix
