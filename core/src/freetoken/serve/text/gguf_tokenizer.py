"""A tokenizer rebuilt from the metadata of a GGUF file.

Keys are those of the GGUF specification (``tokenizer.ggml.*``). Two vocabularies are known: ``gpt2``, byte-level BPE
with its merges, and ``llama``, SentencePiece's BPE with scores in the place of merges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from attrs import frozen
from tokenizers import AddedToken, Tokenizer, normalizers
from tokenizers.models import BPE

from freetoken.serve.text.pre_tokenizers import pre_tokenizer_named
from freetoken.serve.text.token_bytes import byte_level, is_byte_piece, sentencepiece
from freetoken.serve.text.tokenizer_parts import TokenizerParts
from freetoken.vocab.errors import CheckpointError

_T = TypeVar("_T")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPECIAL_TYPES = (_UNKNOWN, _CONTROL)
_SPACE_MARK = "▁"
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the specification spells it so
    "mask_token": "mask_token_id",
}
_STOP_ROLES = ("eos_token_id", "eot_token_id", "eom_token_id")


def parts_from_gguf(metadata: Mapping[str, object]) -> TokenizerParts:
    """Read the vocabulary that ``tokenizer.ggml.model`` names; ``CheckpointError`` names the key that is at fault."""
    keys = _Keys(metadata)
    model = keys.text("tokenizer.ggml.model")
    if model not in _BUILDERS:
        raise CheckpointError(
            f"tokenizer.ggml.model = {model!r}",
            f"this kind of vocabulary is not implemented; known are {', '.join(sorted(_BUILDERS))}",
            "serve the model from its original files (safetensors with tokenizer.json)",
        )
    return _BUILDERS[model](keys, _Vocabulary.read(keys))


def _byte_level_parts(keys: _Keys, vocabulary: _Vocabulary) -> TokenizerParts:
    rule = pre_tokenizer_named(keys.optional_text("tokenizer.ggml.pre"))
    merges = [_pair(merge) for merge in keys.items("tokenizer.ggml.merges", str)]
    backend = Tokenizer(_bpe(vocabulary.ids, merges, ignore_merges=rule.ignore_merges))
    if (normalizer := rule.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rule.pre_tokenizer()
    vocabulary.add_to(backend)
    return TokenizerParts(
        backend,
        byte_level,
        special_tokens=vocabulary.special_tokens(keys),
        eos_ids=vocabulary.eos_ids(keys),
        add_bos=_wants_bos(keys, rule.add_bos),
        add_eos=_wants_eos(keys),
        chat_templates=_chat_templates(keys),
    )


def _sentencepiece_parts(keys: _Keys, vocabulary: _Vocabulary) -> TokenizerParts:
    scores: list[float] = keys.items("tokenizer.ggml.scores", (int, float))
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError("tokenizer.ggml.scores", f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    unknown = [token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == _UNKNOWN]
    space_prefix = keys.flag("tokenizer.ggml.add_space_prefix", True)
    merges = _merges_by_score(vocabulary, scores)
    backend = Tokenizer(
        _bpe(vocabulary.ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown[0] if unknown else None)
    )
    mark_spaces = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark_spaces]) if space_prefix else mark_spaces
    )
    vocabulary.add_to(backend)
    return TokenizerParts(
        backend,
        sentencepiece,
        special_tokens=vocabulary.special_tokens(keys),
        eos_ids=vocabulary.eos_ids(keys),
        add_bos=_wants_bos(keys, True),
        add_eos=_wants_eos(keys),
        leading_space=space_prefix,
        added_spelling=sentencepiece,
        chat_templates=_chat_templates(keys),
    )


_BUILDERS: dict[str, Callable[[_Keys, _Vocabulary], TokenizerParts]] = {
    "gpt2": _byte_level_parts,
    "llama": _sentencepiece_parts,
}


@frozen
class _Vocabulary:
    """Token texts by id, their types, and the way back."""

    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, keys: _Keys) -> _Vocabulary:
        # A nameless slot still counts as an id; no text may ever spell it.
        tokens = [text or f"[EMPTY_{n}]" for n, text in enumerate(keys.items("tokenizer.ggml.tokens", str))]
        ids = {token: n for n, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for n, token in enumerate(tokens) if ids[token] != n)
            raise CheckpointError("tokenizer.ggml.tokens", f"the token {twice!r} stands in the vocabulary twice")
        kinds = keys.optional_items("tokenizer.ggml.token_type", int)
        if kinds is None:
            kinds = [_BYTE if is_byte_piece(token) else _NORMAL for token in tokens]
        if len(kinds) != len(tokens):
            raise CheckpointError("tokenizer.ggml.token_type", f"{len(kinds)} types for {len(tokens)} tokens")
        return cls(tokens, kinds, ids)

    def add_to(self, backend: Tokenizer) -> None:
        """Tokens that are recognised by their text, before any merging; the special ones may be skipped in decoding."""
        backend.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in self._of_kind(*_SPECIAL_TYPES)]
        )
        backend.add_tokens(
            [AddedToken(token, special=False, normalized=False) for token in self._of_kind(_USER_DEFINED)]
        )

    def _of_kind(self, *kinds: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def special_tokens(self, keys: _Keys) -> dict[str, str]:
        ids = {role: self._checked_id(keys, key) for role, key in _ROLES.items()}
        return {role: self.tokens[token_id] for role, token_id in ids.items() if token_id is not None}

    def eos_ids(self, keys: _Keys) -> tuple[int, ...]:
        ids = (self._checked_id(keys, key) for key in _STOP_ROLES)
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def _checked_id(self, keys: _Keys, name: str) -> int | None:
        token_id = keys.optional_int(f"tokenizer.ggml.{name}")
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{name} = {token_id}", f"the vocabulary has only {len(self.tokens)} tokens"
            )
        return token_id


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, best score first.

    SentencePiece merges whichever adjacent pair makes the token with the best score. Byte, control and unused pieces
    take no part. Of several cuts of one token the longest left part comes first.
    """
    mergeable = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.kinds, scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    ranked = sorted(mergeable.items(), key=lambda item: -item[1])
    return [pair for token, _ in ranked for pair in _cuts(token, mergeable)]


def _cuts(token: str, known: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    for cut in range(len(token) - 1, 0, -1):
        if token[:cut] in known and token[cut:] in known:
            yield token[:cut], token[cut:]


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], **settings: Any) -> BPE:
    try:
        return BPE(ids, merges, **settings)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError("tokenizer.ggml.merges", f"they do not fit the vocabulary: {error}") from error


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise CheckpointError("tokenizer.ggml.merges", f"{merge!r} is not two tokens with a space between")
    return left, right


def _wants_bos(keys: _Keys, otherwise: bool) -> bool:
    wanted = keys.flag("tokenizer.ggml.add_bos_token", otherwise)
    return _requires(keys, wanted, "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id")


def _wants_eos(keys: _Keys) -> bool:
    wanted = keys.flag("tokenizer.ggml.add_eos_token", False)
    return _requires(keys, wanted, "tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id")


def _requires(keys: _Keys, wanted: bool, flag: str, id_key: str) -> bool:
    if wanted and keys.optional_int(id_key) is None:
        raise CheckpointError(flag, f"it holds (as a value or by default), but {id_key} is absent")
    return wanted


def _chat_templates(keys: _Keys) -> dict[str, str]:
    """``tokenizer.chat_template`` under the name "default", ``tokenizer.chat_template.NAME`` under NAME."""
    whole = keys.optional_text("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): keys.text(key) for key in keys.starting_with(prefix)}
    return named if whole is None else {"default": whole, **named}


class _Keys:
    """Typed look-ups in the metadata; a wrong type is a ``CheckpointError`` that names the key."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def text(self, key: str) -> str:
        value = self.optional_text(key)
        if value is None:
            raise CheckpointError(key, "the GGUF file does not have this key", "convert the model again")
        return value

    def optional_text(self, key: str) -> str | None:
        return self._typed(key, str)

    def optional_int(self, key: str) -> int | None:
        return self._typed(key, int)

    def flag(self, key: str, otherwise: bool) -> bool:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(key, f"it is {value!r}, not true or false")
        return otherwise if value is None else value

    def items(self, key: str, kind: type[_T] | tuple[type[Any], ...]) -> list[_T]:
        values = self.optional_items(key, kind)
        if values is None:
            raise CheckpointError(key, "the GGUF file does not have this key", "convert the model again")
        return values

    def optional_items(self, key: str, kind: type[_T] | tuple[type[Any], ...]) -> list[_T] | None:
        value: Any = self._metadata.get(key)
        if value is None:
            return None
        if hasattr(value, "tolist"):  # an array of numbers may come as numpy's
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise CheckpointError(key, f"it is not a list of {_names(kind)}")
        try:
            values = list(value)
        except UnicodeDecodeError as error:  # strings may be decoded only now
            raise CheckpointError(key, f"it holds text that is not UTF-8: {error}") from error
        if not all(isinstance(item, kind) for item in values):
            raise CheckpointError(key, f"it is not a list of {_names(kind)}")
        return values

    def starting_with(self, prefix: str) -> list[str]:
        return [key for key in self._metadata if key.startswith(prefix)]

    def _typed(self, key: str, kind: type[_T]) -> _T | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(key, f"it is {value!r}, not a value of type {kind.__name__}")
        return value


def _names(kind: type[Any] | tuple[type[Any], ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
