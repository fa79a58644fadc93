"""Incremental text against decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.serve.text import IncrementalDetokenizer, TextTokenizer

CUTS = st.lists(st.integers(0, 5), max_size=40)


def streamed(tokenizer: TextTokenizer, ids: list[int], cuts: list[int], **settings: bool) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, **settings)
    pieces, at = [], 0
    for size in cuts:
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    return [*pieces, *(stream.push((token_id,)) for token_id in ids[at:]), stream.flush()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 605), max_size=30), cuts=CUTS, skip=st.booleans())
def test_any_byte_level_stream_adds_up_to_decode(
    byte_level_tokenizer: TextTokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Property over any ids, ids beyond the vocabulary and broken UTF-8 included."""
    pieces = streamed(byte_level_tokenizer, ids, cuts, skip_special=skip)
    assert "".join(pieces) == byte_level_tokenizer.decode(ids, skip_special=skip)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 310), max_size=30), cuts=CUTS, skip=st.booleans())
def test_any_spm_stream_adds_up_to_decode(
    spm_tokenizer: TextTokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Property, with byte pieces and the space that encoding adds."""
    pieces = streamed(spm_tokenizer, ids, cuts, skip_special=skip)
    assert "".join(pieces) == spm_tokenizer.decode(ids, skip_special=skip)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), cuts=CUTS)
def test_any_smollm2_stream_adds_up_to_decode(smollm2: TextTokenizer, ids: list[int], cuts: list[int]) -> None:
    assert "".join(streamed(smollm2, ids, cuts)) == smollm2.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=30))
def test_no_character_is_ever_split(
    byte_level_tokenizer: TextTokenizer, spm_tokenizer: TextTokenizer, text: str
) -> None:
    """Round trip: valid text never shows U+FFFD on the way, and nothing is left for the flush."""
    for tokenizer in (byte_level_tokenizer, spm_tokenizer):
        pieces = streamed(tokenizer, tokenizer.encode(text, add_special=False), [])
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""


def test_a_character_arrives_with_its_last_byte(spm_tokenizer: TextTokenizer) -> None:
    ids = spm_tokenizer.encode("x🎉y", add_special=False)
    assert streamed(spm_tokenizer, ids, []) == ["", "x", "", "", "", "🎉", "y", ""]


def test_an_unfinished_character_is_flushed_as_replacement(spm_tokenizer: TextTokenizer) -> None:
    ids = spm_tokenizer.encode("x🎉", add_special=False)[:-1]
    assert streamed(spm_tokenizer, ids, [])[-1] == "\ufffd"


def test_a_stream_that_continues_keeps_its_first_space(spm_tokenizer: TextTokenizer) -> None:
    ids = spm_tokenizer.encode("the", add_special=False)
    assert "".join(streamed(spm_tokenizer, ids, [])) == "the"
    assert "".join(streamed(spm_tokenizer, ids, [], continues=True)) == " the"
