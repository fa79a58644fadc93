"""Text to token ids and back, for one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from freetoken.serve.text.gguf_tokenizer import parts_from_gguf
from freetoken.serve.text.token_bytes import TokenBytes
from freetoken.serve.text.tokenizer_files import parts_from_directory
from freetoken.serve.text.tokenizer_parts import TokenizerParts
from freetoken.vocab.errors import UsageError


class TextTokenizer:
    """Immutable after construction; ``encode`` and ``decode`` may be called from any thread.

    ``vocab_size`` counts the tokenizer's ids, added tokens included; a model's embedding may be padded beyond it.
    ``special_tokens`` (role -> text) and ``chat_templates`` (name -> source) are what ``ChatTemplate`` needs.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._leading_space = parts.leading_space
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens: Mapping[str, str] = dict(parts.special_tokens)
        self.chat_templates: Mapping[str, str] = dict(parts.chat_templates)
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=True), *(token_id + 1 for token_id in added)])
        self.bos_id = self._id_of_role("bos_token")
        self.pad_id = self._id_of_role("pad_token")
        self.eos_ids = parts.eos_ids
        spelled = (backend.id_to_token, parts.spelling, added.keys(), parts.added_spelling)
        self._all_bytes = TokenBytes(*spelled)
        self._plain_bytes = TokenBytes(*spelled, dropped=self.special_ids)
        self._backend_adds_special = parts.add_bos is None and parts.add_eos is None
        self._prefix = [self.bos_id] if parts.add_bos and self.bos_id is not None else []
        self._suffix = [parts.eos_ids[0]] if parts.add_eos and parts.eos_ids else []

    @classmethod
    def from_directory(cls, path: str | Path) -> TextTokenizer:
        """Read ``tokenizer.json`` and its neighbours. ``CheckpointError`` names the file that is absent or damaged."""
        return cls(parts_from_directory(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> TextTokenizer:
        """Rebuild it from a GGUF header's keys. ``CheckpointError`` names the key that is absent, wrong or unknown."""
        return cls(parts_from_gguf(metadata))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of ``text``, in which special tokens are recognised by their text.

        ``add_special`` puts the beginning-of-text token (and whatever else the checkpoint wants) around it; a rendered
        chat template already holds it. ``UsageError`` on text that is not valid Unicode.
        """
        native = add_special and self._backend_adds_special
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=native).ids
        except TypeError as error:  # what the backend raises on a lone surrogate
            raise UsageError("text to tokenize", _fault(text), "send UTF-8 without lone surrogates") from error
        if add_special and (self._prefix or self._suffix):
            return [*self._prefix, *ids, *self._suffix]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary become nothing."""
        table = self.bytes_table(skip_special)
        text = b"".join([table[token_id] for token_id in ids]).decode("utf-8", "replace")
        return text[1:] if self._leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, special tokens by their text; ``b""`` beyond the vocabulary."""
        return self._all_bytes[token_id]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, such as ``"<|im_end|>"``."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def check_ids(self, ids: Sequence[int]) -> None:
        """``UsageError`` naming the first id that no token has; for ids that a client sent."""
        for position, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                raise UsageError(
                    f"token id {token_id} at position {position}",
                    f"this model's ids run from 0 to {self.vocab_size - 1}",
                )

    def bytes_table(self, skip_special: bool) -> TokenBytes:
        """Token id -> bytes for loops; with ``skip_special`` the special tokens are empty."""
        return self._plain_bytes if skip_special else self._all_bytes

    @property
    def leading_space(self) -> bool:
        """Whether encoding puts a space before the text, which decoding takes away again."""
        return self._leading_space

    def _id_of_role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.token_id(token)


def _fault(text: object) -> str:
    if not isinstance(text, str):
        return f"it is {type(text).__name__}, not text"
    at = next((n for n, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
    return f"it is not valid Unicode: a lone surrogate at position {at}" if at is not None else "it cannot be encoded"
