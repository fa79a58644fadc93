"""What a checkpoint says about its tokenizer, whichever files it was read from."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen
from tokenizers import Tokenizer

from freetoken.serve.text.token_bytes import Spelling


@frozen(eq=False)
class TokenizerParts:
    """``special_tokens`` maps a role (``"bos_token"``) to its text, as chat templates name them.

    ``added_spelling`` holds for tokens that are recognised by their text: byte-level vocabularies keep those raw.
    ``add_bos`` and ``add_eos`` are ``None`` where the backend's own post-processor decides. ``leading_space`` says that
    encoding puts one space before the text, so that decoding takes one away.
    """

    backend: Tokenizer
    spelling: Spelling
    special_tokens: Mapping[str, str] = field(factory=dict)
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    leading_space: bool = False
    added_spelling: Spelling = str.encode
    chat_templates: Mapping[str, str] = field(factory=dict)
