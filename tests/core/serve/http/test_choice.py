"""A choice as it grows: for any cut into deltas the same text, log-probabilities and end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from serve_bench import byte_tokenizer
from serve_fake_worker import EOS

from freetoken.serve.http.choice import Choice
from freetoken.serve.messages import Delta, TokenLogprob
from freetoken.vocab.sampling import SamplingParams

TOKENIZER = byte_tokenizer()

texts = st.text(alphabet="ab ö€😀", max_size=20)


@st.composite
def cut(draw: st.DrawFn, tokens: list[int]) -> list[list[int]]:
    """The tokens in pieces of one to three, as a step's deltas bring them."""
    pieces = []
    while tokens:
        size = draw(st.integers(1, 3))
        pieces.append(tokens[:size])
        tokens = tokens[size:]
    return pieces


@given(st.data(), texts, st.lists(st.text(alphabet="ab ö", min_size=1, max_size=3), max_size=3), st.booleans())
def test_any_cut_gives_the_text_up_to_the_first_stop_string(
    data: st.DataObject, text: str, stops: list[str], logprobs: bool
) -> None:
    """Property; oracle: the shortest prefix of the text that ends in a stop string, found by trying them all."""
    params = SamplingParams(stop=tuple(stops), logprobs=0 if logprobs else None)
    choice = Choice(0, 0, TOKENIZER, params, frozenset({EOS}), continues=True)
    pieces = data.draw(cut(list(text.encode())))
    given_pieces = [*pieces, [EOS]]
    out, entries, ends = "", [], []
    for index, tokens in enumerate(given_pieces):
        finish = "stop" if index == len(given_pieces) - 1 else ""
        news = tuple(TokenLogprob(token, -1.0) for token in tokens) if logprobs else ()
        piece = choice.push(Delta("r", tuple(tokens), finish, news))
        out += piece.text
        entries += piece.logprobs
        if piece.finish:
            ends.append((piece.finish, piece.stop_reason))
            break
    matched = _first_stop(text, stops)
    assert out == (text if matched is None else matched[0])
    assert ends == [("stop", EOS if matched is None else matched[1])]
    if logprobs and matched is None:
        assert bytes(entry.token for entry in entries).decode() == text


def _first_stop(text: str, stops: list[str]) -> tuple[str, str] | None:
    for length in range(len(text) + 1):
        ending = [stop for stop in stops if text[:length].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: length - len(stop)], stop
    return None


def test_an_unfinished_character_comes_out_at_the_end_as_a_replacement() -> None:
    """Oracle: bytes.decode(errors="replace")."""
    choice = Choice(0, 0, TOKENIZER, SamplingParams(), frozenset(), continues=True)
    first = choice.push(Delta("r", (0xF0, 0x9F)))
    last = choice.push(Delta("r", (), "length"))
    assert first.text + last.text == b"\xf0\x9f".decode(errors="replace")
    assert (first.text, last.finish) == ("", "length")
