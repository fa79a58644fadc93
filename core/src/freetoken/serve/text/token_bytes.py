"""How the spelling of a token in its vocabulary stands for bytes of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

Spelling = Callable[[str], bytes]


def _printable_alphabet() -> dict[int, str]:
    """GPT-2's alphabet: byte -> character. Printable Latin-1 stands for itself, the other 68 bytes for U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


BYTE_TO_CHAR = _printable_alphabet()
_CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}
_SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_level(token: str) -> bytes:
    """Spelled in GPT-2's alphabet; a token with any other character is raw text."""
    try:
        return bytes([_CHAR_TO_BYTE[char] for char in token])
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    """``▁`` is a space, ``<0x0A>`` a byte, all else itself."""
    if match := _BYTE_PIECE.match(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def is_byte_piece(token: str) -> bool:
    return _BYTE_PIECE.match(token) is not None


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, worked out at first use: a vocabulary of 150k is never walked at start.

    ``added`` ids are spelled by ``added_spelling``; ``dropped`` ids and ids beyond the vocabulary (models pad it) give
    ``b""``.
    """

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        spelling: Spelling,
        added: Collection[int] = frozenset(),
        added_spelling: Spelling = str.encode,
        dropped: Collection[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._token_of = token_of
        self._spelling = spelling
        self._added = added
        self._added_spelling = added_spelling
        self._dropped = dropped

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._work_out(token_id)
        return data

    def _work_out(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None or token_id in self._dropped:
            return b""
        return self._added_spelling(token) if token_id in self._added else self._spelling(token)
