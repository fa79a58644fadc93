"""Text of a token stream as it grows."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from freetoken.serve.text.tokenizer import TextTokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Tokens in, newly complete text out; all pushes and the flush together are ``tokenizer.decode`` of all tokens.

    A character whose bytes span tokens is held back until its last byte. Each token costs one look-up and the decoding
    of its own bytes, however long the stream is. ``continues`` says that the stream goes on from earlier text, so that
    a leading space is part of the answer and not the tokenizer's own.
    """

    def __init__(self, tokenizer: TextTokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        self._bytes_of = tokenizer.bytes_table(skip_special).__getitem__
        self._utf8 = _Utf8Decoder(errors="replace")
        self._strip_space = tokenizer.leading_space and not continues

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return self._stripped(self._utf8.decode(b"".join(map(self._bytes_of, token_ids))))

    def flush(self) -> str:
        """What was held back, an unfinished character as U+FFFD; the stream ends here."""
        return self._stripped(self._utf8.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text[1:] if text[0] == " " else text
        return text
