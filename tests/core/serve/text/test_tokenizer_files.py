"""Tokenizers read from a checkpoint's directory against transformers' ``AutoTokenizer`` on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors

from freetoken.serve.text import TextTokenizer
from freetoken.vocab.errors import CheckpointError

TEXTS = ("", " hi", "the quick  brown", "<|bos|>x<think>y</think><|eos|>", "naïve 你好 🎉", "<|tool|>z<pad>")


def write(path: Path, backend: Tokenizer, **files: Any) -> Path:
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def copy(backend: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(backend.to_str())


def assert_as_transformers(path: Path) -> TextTokenizer:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    ours = TextTokenizer.from_directory(path)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.pad_id == theirs.pad_token_id
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for add_special in (False, True):
            ids = ours.encode(text, add_special)
            assert ids == theirs.encode(text, add_special_tokens=add_special), (text, add_special)
            for skip in (False, True):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip) == expected, (text, skip)
    return ours


NAMED = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


@pytest.mark.parametrize(
    "config",
    [
        {},
        NAMED,
        {**NAMED, "add_bos_token": True},
        {**NAMED, "add_bos_token": True, "add_eos_token": True},
        {**NAMED, "add_bos_token": False},
        {
            "bos_token": {"__type": "AddedToken", "content": "<|bos|>", "lstrip": False},
            "eos_token": None,
            "unk_token": None,
        },
        {**NAMED, "pad_token": "<pad>"},
        {**NAMED, "add_bos_token": None, "model_max_length": 512, "clean_up_tokenization_spaces": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_processor", [False, True])
def test_byte_level_configurations(
    tmp_path: Path, trained_backend: Tokenizer, config: dict[str, Any], with_processor: bool
) -> None:
    backend = copy(trained_backend)
    if with_processor:
        bos = backend.token_to_id("<|bos|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|>:0 $A:0", pair="<|bos|>:0 $A:0 $B:1", special_tokens=[("<|bos|>", bos)]
        )
    assert_as_transformers(write(tmp_path, backend, tokenizer_config=config))


def test_tokens_listed_only_in_the_configuration(tmp_path: Path, trained_backend: Tokenizer) -> None:
    size = trained_backend.get_vocab_size()
    think = trained_backend.token_to_id("<think>")
    listed = {
        str(think): {"content": "<think>", "special": True},
        str(size): {"content": "<|tool|>", "special": True},
        str(size + 1): {"content": "</think>", "special": False, "normalized": False},
    }
    ours = assert_as_transformers(
        write(tmp_path, trained_backend, tokenizer_config={**NAMED, "added_tokens_decoder": listed})
    )
    assert {think, size} <= ours.special_ids
    assert size + 1 not in ours.special_ids


def test_a_special_tokens_map_fills_in(tmp_path: Path, trained_backend: Tokenizer) -> None:
    ours = assert_as_transformers(write(tmp_path, trained_backend, special_tokens_map=NAMED, tokenizer_config={}))
    assert ours.special_tokens == NAMED


def test_truncation_and_padding_are_switched_off(tmp_path: Path, trained_backend: Tokenizer) -> None:
    """Oracle: the same tokenizer without them."""
    backend = copy(trained_backend)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    text = "a rather long text: 0123456789 zzz"
    expected = trained_backend.encode(text, add_special_tokens=False).ids
    assert 4 < len(expected) < 64
    assert TextTokenizer.from_directory(write(tmp_path, backend)).encode(text) == expected


@pytest.fixture
def spm_backend(spm_metadata: dict[str, Any]) -> Tokenizer:
    from freetoken.serve.text.gguf_tokenizer import parts_from_gguf

    return copy(parts_from_gguf(spm_metadata).backend)


LEGACY = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
BARE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize("kind", ["legacy", "first", "bare"])
def test_sentencepiece_shapes(tmp_path: Path, spm_backend: Tokenizer, kind: str) -> None:
    """The three shapes of published SentencePiece conversions: Llama 2's, its successor's, and Gemma's."""
    if kind == "first":
        spm_backend.normalizer = normalizers.Sequence([])
        spm_backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    if kind == "bare":
        spm_backend.normalizer = normalizers.Replace(" ", "▁")
    spm_backend.decoder = BARE if kind == "bare" else LEGACY
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    assert_as_transformers(write(tmp_path, spm_backend, tokenizer_config=config))


def test_chat_templates_by_place(tmp_path: Path, trained_backend: Tokenizer) -> None:
    """Round trip: each way to store a template, and which goes first."""
    write(tmp_path, trained_backend, chat_template={"chat_template": "json file"})
    assert TextTokenizer.from_directory(tmp_path).chat_templates == {"default": "json file"}
    write(tmp_path, trained_backend, tokenizer_config={"chat_template": "config"})
    assert TextTokenizer.from_directory(tmp_path).chat_templates == {"default": "config"}
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    write(tmp_path, trained_backend, tokenizer_config={"chat_template": listed})
    assert TextTokenizer.from_directory(tmp_path).chat_templates == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.jinja").write_text("é file\n", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("C")
    expected = {"default": "é file\n", "tool_use": "B", "rag": "C"}
    assert TextTokenizer.from_directory(tmp_path).chat_templates == expected


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"content": "<|bos|>x"}}}', "same revision"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "chat_template"),
        ("chat_template.jinja", b"\xff\xfe\xfd", "chat_template.jinja"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, trained_backend: Tokenizer, file: str, content: str | bytes | None, named: str
) -> None:
    write(tmp_path, trained_backend)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=named):
        TextTokenizer.from_directory(tmp_path)


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path, trained_backend: Tokenizer) -> None:
    backend = copy(trained_backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        TextTokenizer.from_directory(write(tmp_path, backend))


def test_importing_needs_no_torch() -> None:
    """Oracle: a fresh interpreter's list of modules."""
    import subprocess
    import sys

    code = "import sys, freetoken.serve.text; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
