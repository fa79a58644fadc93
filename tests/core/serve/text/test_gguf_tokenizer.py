"""Tokenizers rebuilt from GGUF metadata against transformers, SentencePiece's own rule and where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from freetoken.serve.text import TextTokenizer
from freetoken.vocab.errors import CheckpointError, UsageError

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
MIXED = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", " ", "\n", "'ll", "the", "42", "é", "你好", "🎉"])).map(
    "".join
)


# ------------------------------------------------------------------------------------------- SmolLM2, transformers


@pytest.fixture(scope="session")
def theirs(smollm2_file: Path) -> Any:
    """transformers' reading of the file, plus the split into single digits: the published tokenizer has it
    (``Digits(individual_digits=True)``), transformers' GGUF reader leaves it out."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.model
def test_smollm2_encodes_nasty_texts_as_transformers(
    smollm2: TextTokenizer, theirs: Any, nasty_texts: tuple[str, ...]
) -> None:
    for text in nasty_texts:
        ids = smollm2.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False), repr(text)
        assert smollm2.encode(text, add_special=True) == theirs.encode(text), repr(text)
        assert smollm2.decode(ids, skip_special=False) == text


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(text=TEXTS | MIXED)
def test_smollm2_encodes_any_text_as_transformers(smollm2: TextTokenizer, theirs: Any, text: str) -> None:
    ids = smollm2.encode(text, add_special=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    known = {smollm2.token_bytes(token_id) for token_id in range(smollm2.vocab_size)}
    if all(bytes([byte]) in known for byte in text.encode()):  # this vocabulary lacks a few bytes
        assert smollm2.decode(ids, skip_special=False) == text


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20), skip=st.booleans())
def test_smollm2_decodes_any_ids_as_transformers(
    smollm2: TextTokenizer, theirs: Any, ids: list[int], skip: bool
) -> None:
    assert smollm2.decode(ids, skip_special=skip) == theirs.decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )


@pytest.mark.model
def test_smollm2_special_tokens_are_those_of_transformers(smollm2: TextTokenizer, theirs: Any) -> None:
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.pad_id) == (
        theirs.bos_token_id,
        (theirs.eos_token_id,),
        theirs.pad_token_id,
    )
    assert smollm2.special_ids == set(theirs.all_special_ids) | set(range(17))
    assert smollm2.vocab_size == len(theirs) == 49152
    assert smollm2.chat_templates == {"default": theirs.chat_template}


# ------------------------------------------------------------------------------------------- byte-level


def test_byte_level_is_the_vocabulary_it_came_from(
    trained_backend: Tokenizer, byte_level_tokenizer: TextTokenizer, nasty_texts: tuple[str, ...]
) -> None:
    """Round trip: a trained tokenizer, written as GGUF metadata, reads back as itself."""
    for text in (*nasty_texts, "<|bos|>a<think>b</think><|eos|>"):
        expected = trained_backend.encode(text, add_special_tokens=False).ids
        assert byte_level_tokenizer.encode(text) == expected, repr(text)
        assert byte_level_tokenizer.decode(expected, skip_special=True) == trained_backend.decode(expected)
        assert byte_level_tokenizer.decode(expected, skip_special=False) == text


def test_token_bytes_add_up_to_the_text(byte_level_tokenizer: TextTokenizer, nasty_texts: tuple[str, ...]) -> None:
    """Round trip over UTF-8."""
    for text in nasty_texts:
        assert b"".join(map(byte_level_tokenizer.token_bytes, byte_level_tokenizer.encode(text))) == text.encode()
    assert byte_level_tokenizer.token_bytes(10**6) == b""


def test_user_defined_tokens_survive_skipping_special_ones(byte_level_tokenizer: TextTokenizer) -> None:
    ids = byte_level_tokenizer.encode("<|bos|><think>x<|eos|>")
    assert byte_level_tokenizer.decode(ids, skip_special=True) == "<think>x"


def test_raw_added_tokens_decode_to_themselves(trained_metadata: dict[str, Any]) -> None:
    """A token outside (``<｜end▁of▁text｜>``) or inside (``é``) the byte alphabet is text, not spelled bytes."""
    tokens = [*trained_metadata["tokenizer.ggml.tokens"], "<｜end▁of▁text｜>", "éé"]
    kinds = [*trained_metadata["tokenizer.ggml.token_type"], 3, 4]
    ours = TextTokenizer.from_gguf(
        {**trained_metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    )
    ids = ours.encode("a<｜end▁of▁text｜>éé")
    assert ids[-2:] == [len(tokens) - 2, len(tokens) - 1]
    assert ours.decode(ids, skip_special=False) == "a<｜end▁of▁text｜>éé"
    assert ours.decode(ids, skip_special=True) == "aéé"


def test_flags_add_beginning_and_end(trained_metadata: dict[str, Any]) -> None:
    bos, eos = (trained_metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
    ours = TextTokenizer.from_gguf(
        {**trained_metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    )
    plain = ours.encode("hi", add_special=False)
    assert ours.encode("hi", add_special=True) == [bos, *plain, eos]
    llama3 = {**trained_metadata, "tokenizer.ggml.pre": "llama-bpe"}
    assert TextTokenizer.from_gguf(llama3).encode("hi")[0] == bos
    assert TextTokenizer.from_gguf({**llama3, "tokenizer.ggml.add_bos_token": False}).encode("hi")[0] != bos


def test_all_three_ways_to_stop_are_eos(trained_metadata: dict[str, Any]) -> None:
    eos = trained_metadata["tokenizer.ggml.eos_token_id"]
    more = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": eos}
    assert TextTokenizer.from_gguf({**trained_metadata, **more}).eos_ids == (eos, 5)


def test_chat_templates_are_found_by_name(trained_metadata: dict[str, Any]) -> None:
    more = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    assert TextTokenizer.from_gguf({**trained_metadata, **more}).chat_templates == {"default": "A", "tool_use": "B"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.pre": "mystery"}, "mystery"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "twice"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "nospace"),
        ({"tokenizer.ggml.merges": ["zzzz yyyy"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id"),
        ({"tokenizer.ggml.bos_token_id": "one"}, "bos_token_id"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "add_bos_token"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token"),
        ({"tokenizer.chat_template": 3}, "chat_template"),
    ],
)
def test_damaged_metadata_is_refused_by_name(
    trained_metadata: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        TextTokenizer.from_gguf({**trained_metadata, **change})


def test_numpy_arrays_serve_as_lists(trained_metadata: dict[str, Any], byte_level_tokenizer: TextTokenizer) -> None:
    """Round trip: a reader may hand numbers over as numpy arrays."""
    import numpy as np

    kinds = np.array(trained_metadata["tokenizer.ggml.token_type"], dtype=np.int32)
    ours = TextTokenizer.from_gguf({**trained_metadata, "tokenizer.ggml.token_type": kinds})
    assert ours.special_ids == byte_level_tokenizer.special_ids


@pytest.mark.model
def test_the_engines_own_reader_gives_the_same_tokenizer(smollm2: TextTokenizer, smollm2_file: Path) -> None:
    """Second implementation: ``weights.gguf`` instead of the tests' reader."""
    from freetoken.weights.gguf import GGUFFile

    ours = TextTokenizer.from_gguf(GGUFFile(smollm2_file).metadata)
    assert ours.encode("Hello, 你好 <|im_end|>") == smollm2.encode("Hello, 你好 <|im_end|>")
    assert (ours.vocab_size, ours.special_ids, ours.eos_ids) == (
        smollm2.vocab_size,
        smollm2.special_ids,
        smollm2.eos_ids,
    )


class _LateStrings(Sequence[str]):
    """Strings that are decoded when they are read, as a reader of large files may hand them over."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return b"\xff\xfe".decode()


def test_tokens_that_are_no_utf8_are_refused(trained_metadata: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="UTF-8"):
        TextTokenizer.from_gguf({**trained_metadata, "tokenizer.ggml.tokens": _LateStrings()})


def test_only_rules_that_say_so_take_a_whole_word_without_merges(trained_metadata: dict[str, Any]) -> None:
    """Oracle: the published Llama 3 tokenizer's ``ignore_merges``; the word is a token that no merge makes."""
    tokens = [*trained_metadata["tokenizer.ggml.tokens"], "zzqzz"]
    kinds = [*trained_metadata["tokenizer.ggml.token_type"], 1]
    grown = {**trained_metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}

    def encode(pre: str) -> list[int]:
        return TextTokenizer.from_gguf({**grown, "tokenizer.ggml.pre": pre}).encode("zzqzz", add_special=False)

    assert encode("llama-bpe") == [len(tokens) - 1]
    assert len(encode("qwen2")) > 1


def test_only_rules_that_say_so_compose_characters(trained_metadata: dict[str, Any]) -> None:
    """Oracle: ``unicodedata``'s NFC, which the published Qwen tokenizers apply and GPT-2's does not."""
    import unicodedata

    text = "cafe\u0301 A\u030a"

    def decoded(pre: str) -> str:
        ours = TextTokenizer.from_gguf({**trained_metadata, "tokenizer.ggml.pre": pre})
        return ours.decode(ours.encode(text, add_special=False))

    assert decoded("qwen2") == unicodedata.normalize("NFC", text)
    assert decoded("gpt-2") == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(byte_level_tokenizer: TextTokenizer, text: str) -> None:
    with pytest.raises(UsageError, match="surrogate at position"):
        byte_level_tokenizer.encode(text)


def test_ids_of_clients_are_checked(byte_level_tokenizer: TextTokenizer) -> None:
    byte_level_tokenizer.check_ids([0, byte_level_tokenizer.vocab_size - 1])
    for wrong in (-1, byte_level_tokenizer.vocab_size):
        with pytest.raises(UsageError, match=f"{wrong} at position 1"):
            byte_level_tokenizer.check_ids([0, wrong])


# ------------------------------------------------------------------------------------------- SentencePiece


def _merge_like_sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """The rule itself: of all adjacent pairs that make a piece, merge the best-scored, of equals the leftmost."""
    symbols = list(text)
    while True:
        joined = [left + right for left, right in pairwise(symbols)]
        pairs = [(scores[piece], -n) for n, piece in enumerate(joined) if piece in scores]
        if not pairs:
            return symbols
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def _no_self_overlap(piece: str) -> bool:
    """Where a piece can overlap itself, two cuts of it compete, and ranked merges cannot tell which stands left."""
    return all(piece[:n] != piece[-n:] for n in range(1, len(piece)))


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("abc▁", min_size=2, max_size=6).filter(_no_self_overlap), max_size=30, unique=True),
    text=st.text("abc ", max_size=40),
)
def test_spm_merges_as_sentencepiece_does(spm_metadata: dict[str, Any], pieces: list[str], text: str) -> None:
    base = spm_metadata["tokenizer.ggml.tokens"][:259]
    tokens = [*base, *pieces, "a", "b", "c", "▁"]
    scores = {piece: -float(n) for n, piece in enumerate(tokens[259:])}
    ours = TextTokenizer.from_gguf(
        {
            **spm_metadata,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * len(scores))],
            "tokenizer.ggml.scores": [0.0] * 259 + list(scores.values()),
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    expected = _merge_like_sentencepiece(text.replace(" ", "▁"), scores)
    assert ours.encode(text, add_special=False) == [tokens.index(piece) for piece in expected]


@settings(max_examples=200, deadline=None)
@given(text=st.text("thequick anso你好.\n", max_size=40))
def test_spm_encodes_as_transformers_llama_tokenizer(spm_metadata: dict[str, Any], text: str) -> None:
    """transformers' ``LlamaTokenizer`` over the same vocabulary, for text that does not begin with a space (there it
    adds none of its own, unlike SentencePiece)."""
    assume(not text.startswith(" "))
    assert TextTokenizer.from_gguf(spm_metadata).encode(text, add_special=False) == _llama(spm_metadata).encode(
        text, add_special_tokens=False
    )


_LLAMA: list[Any] = []


def _llama(metadata: dict[str, Any]) -> Any:
    if not _LLAMA:
        pytest.importorskip("transformers")
        from transformers.models.llama.tokenization_llama import LlamaTokenizer
        from transformers.tokenization_utils_base import generate_merges

        tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
        plain = dict(list(zip(tokens, scores, strict=True))[259:])
        vocab = {token: n for n, token in enumerate(tokens)}
        merges = generate_merges({token: vocab[token] for token in plain}, plain)
        _LLAMA.append(LlamaTokenizer(vocab=vocab, merges=merges))
    return _LLAMA[0]


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_spm_gives_back_every_text(spm_tokenizer: TextTokenizer, text: str) -> None:
    """Round trip through byte fallback, except for the marks that the vocabulary itself uses."""
    assume("▁" not in text and "<" not in text)
    ids = spm_tokenizer.encode(text, add_special=True)
    assert ids[0] == spm_tokenizer.bos_id
    assert spm_tokenizer.decode(ids, skip_special=True) == text


def test_spm_unknown_characters_become_bytes(spm_tokenizer: TextTokenizer) -> None:
    ids = spm_tokenizer.encode("é", add_special=False)
    assert [spm_tokenizer.token_bytes(i) for i in ids] == [b" ", b"\xc3", b"\xa9"]
    assert spm_tokenizer.token_bytes(spm_tokenizer.encode(" ", add_special=False)[0]) == b"  "


def test_spm_text_that_spells_a_byte_piece_is_text(spm_metadata: dict[str, Any]) -> None:
    """SentencePiece's rule: byte pieces are never merged to, even where their parts are pieces."""
    parts = ["<0", "<0x", "<0x4", "<0x41", "<", "0", "x4", "4", "1", ">", "1>"]
    grown = {
        "tokenizer.ggml.tokens": [*spm_metadata["tokenizer.ggml.tokens"], *parts],
        "tokenizer.ggml.token_type": [*spm_metadata["tokenizer.ggml.token_type"], *([1] * len(parts))],
        "tokenizer.ggml.scores": [*spm_metadata["tokenizer.ggml.scores"], *(-100.0 - n for n in range(len(parts)))],
    }
    ours = TextTokenizer.from_gguf({**spm_metadata, **grown})
    ids = ours.encode("<0x41>", add_special=False)
    assert ours.token_id("<0x41") in ids
    assert ours.token_id("<0x41>") not in ids
    assert ours.decode(ids) == "<0x41>"


def test_spm_space_prefix_follows_the_flag(spm_metadata: dict[str, Any], spm_tokenizer: TextTokenizer) -> None:
    bare = TextTokenizer.from_gguf({**spm_metadata, "tokenizer.ggml.add_space_prefix": False})
    assert spm_tokenizer.encode("the", add_special=False) == [spm_tokenizer.token_id("▁the")]
    assert bare.encode("the", add_special=False) == [bare.token_id("t"), bare.token_id("he")]
    assert bare.decode(bare.encode(" the", add_special=False)) == " the"


def test_spm_without_types_or_with_too_few_scores(spm_metadata: dict[str, Any], spm_tokenizer: TextTokenizer) -> None:
    untyped = TextTokenizer.from_gguf({**spm_metadata, "tokenizer.ggml.token_type": None})
    assert untyped.encode("the quick é") == spm_tokenizer.encode("the quick é")
    with pytest.raises(CheckpointError, match="scores"):
        TextTokenizer.from_gguf({**spm_metadata, "tokenizer.ggml.scores": [0.0]})
