"""A tokenizer read from a Hugging Face checkpoint: ``tokenizer.json`` and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from tokenizers import AddedToken, Tokenizer

from freetoken.serve.text.token_bytes import Spelling, byte_level, sentencepiece
from freetoken.serve.text.tokenizer_parts import TokenizerParts
from freetoken.vocab.errors import CheckpointError

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SPECIAL_MAP = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_TEMPLATE_JSON = "chat_template.json"
_NAMED_TEMPLATES = "additional_chat_templates"


def parts_from_directory(path: Path) -> TokenizerParts:
    """Read every file that says something about the tokenizer; ``CheckpointError`` names the file at fault.

    What stands around a text is the post-processor's business: like transformers, ``tokenizer.json`` goes before the
    ``add_bos_token`` of ``tokenizer_config.json``, which older tools left there with whatever value.
    """
    config = _read_json(path / _CONFIG)
    special_tokens = _special_tokens(path / _CONFIG, {**_read_json(path / _SPECIAL_MAP), **config})
    backend = _read_backend(path)
    _add_listed_tokens(backend, config, path / _CONFIG)
    _mark_special(backend, special_tokens)
    text = _decoding(backend, path / _TOKENIZER)
    eos_id = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return TokenizerParts(
        backend,
        text.spelling,
        special_tokens=special_tokens,
        eos_ids=() if eos_id is None else (eos_id,),
        leading_space=text.leading_space,
        added_spelling=text.added_spelling,
        chat_templates=_chat_templates(path, config),
    )


def _read_backend(path: Path) -> Tokenizer:
    file = path / _TOKENIZER
    if not file.is_file():
        raise CheckpointError(
            str(file),
            "the checkpoint has no tokenizer.json",
            "convert its tokenizer once: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) in transformers",
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(str(file), f"it cannot be read: {error}", "download the file again") from error


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(str(file), f"it is not valid JSON: {error}", "download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(file), f"it holds {type(value).__name__}, not an object")
    return value


# ------------------------------------------------------------------------------------------- special tokens


def _special_tokens(file: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Role -> text of every ``…_token`` entry, those of ``extra_special_tokens`` included."""
    extra = config.get("extra_special_tokens")
    entries = {**(extra if isinstance(extra, dict) else {}), **config}
    roles = {key: value for key, value in entries.items() if key.endswith("_token") and not isinstance(value, bool)}
    return {key: _token_text(file, key, value) for key, value in roles.items() if value is not None}


def _token_text(file: Path, key: str, value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{file}: {key}", f"it is {value!r}, not a token")
    return text


def _add_listed_tokens(backend: Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """``added_tokens_decoder`` may list tokens that ``tokenizer.json`` lacks; each must land on the id it names."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(str(key).isdigit() for key in listed):
        raise CheckpointError(f"{file}: added_tokens_decoder", "it is not an object from token ids to tokens")
    present = backend.get_added_tokens_decoder()
    for token_id, entry in sorted((int(key), value) for key, value in listed.items()):
        token = _added_token(file, entry)
        if token_id not in present or present[token_id].special != token.special:
            backend.add_tokens([token])
            if backend.token_to_id(token.content) != token_id:
                raise CheckpointError(
                    f"{file}: added_tokens_decoder[{token_id}]",
                    f"{token.content!r} has the id {backend.token_to_id(token.content)} by {_TOKENIZER}",
                    "take both files from the same revision of the model",
                )


def _added_token(file: Path, entry: object) -> AddedToken:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{file}: added_tokens_decoder", f"the entry {entry!r} is not an object")
    flags = {key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "special")}
    normalized = bool(entry.get("normalized", not flags["special"]))
    return AddedToken(_token_text(file, "added_tokens_decoder", entry), normalized=normalized, **flags)


def _mark_special(backend: Tokenizer, special_tokens: Mapping[str, str]) -> None:
    """A token that has a role is recognised by its text and left out of answers, whatever ``tokenizer.json`` says."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in dict.fromkeys(special_tokens.values()) if token not in marked]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


# ------------------------------------------------------------------------------------------- decoding


@frozen
class _Decoding:
    spelling: Spelling
    added_spelling: Spelling
    leading_space: bool


def _decoding(backend: Tokenizer, file: Path) -> _Decoding:
    """Which of the two spellings the decoder undoes, and whether it strips a space."""
    steps = _decoder_steps(backend)
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"] or (kinds == ["ByteLevel", "Fuse"]):
        return _Decoding(byte_level, str.encode, leading_space=False)
    if steps and all(_is_sentencepiece_step(step) for step in steps):
        return _Decoding(sentencepiece, sentencepiece, leading_space=any(_strips_space(step) for step in steps))
    raise CheckpointError(
        f"{file}: decoder",
        f"{' + '.join(kinds) or 'none'} is not implemented; known are byte-level and SentencePiece decoders",
    )


def _decoder_steps(backend: Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _is_sentencepiece_step(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Replace":
        return bool(step.get("pattern") == {"String": "▁"} and step.get("content") == " ")
    if kind == "Strip":
        return bool(step.get("content") == " " and step.get("start", 0) <= 1 and step.get("stop", 0) == 0)
    if kind == "Metaspace":
        return bool(step.get("replacement", "▁") == "▁")
    return kind in ("ByteFallback", "Fuse")


def _strips_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step.get("type") == "Strip" and step.get("start") == 1)


# ------------------------------------------------------------------------------------------- chat templates


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source. A file of its own goes before the entry in ``tokenizer_config.json``."""
    templates = _configured_templates(config.get("chat_template"), path / _CONFIG)
    if not templates:
        templates = _configured_templates(_read_json(path / _TEMPLATE_JSON).get("chat_template"), path / _TEMPLATE_JSON)
    if (path / _TEMPLATE).is_file():
        templates["default"] = _read_text(path / _TEMPLATE)
    for file in sorted((path / _NAMED_TEMPLATES).glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates


def _configured_templates(value: object, file: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, dict) and isinstance(entry.get("template"), str) for entry in entries):
        raise CheckpointError(f"{file}: chat_template", "it is neither a text nor a list of named templates")
    return {str(entry.get("name", "default")): entry["template"] for entry in entries}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(str(file), f"it is not UTF-8: {error}", "download the file again") from error
