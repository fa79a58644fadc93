"""The text side of a checkpoint: tokenizer, chat template and sampling wishes. Imports no torch."""

from __future__ import annotations

from attrs import frozen

from freetoken.plugin.specs import ModelFamilySpec
from freetoken.serve.text import ChatTemplate, GenerationDefaults, TextTokenizer
from freetoken.weights.checkpoint import Checkpoint


@frozen(eq=False)
class TextSide:
    tokenizer: TextTokenizer
    template: ChatTemplate
    defaults: GenerationDefaults


def text_side(checkpoint: Checkpoint, family: ModelFamilySpec) -> TextSide:
    """Raises ``CheckpointError`` for a tokenizer that is absent, damaged or not implemented."""
    source = checkpoint.tokenizer
    if source.gguf is not None:
        tokenizer = TextTokenizer.from_gguf(source.gguf)
    else:
        tokenizer = TextTokenizer.from_directory(checkpoint.path)
    templates = dict(tokenizer.chat_templates)
    if not templates and family.chat.fallback_template is not None:
        templates = {"default": family.chat.fallback_template}
    template = ChatTemplate(templates, tokenizer.special_tokens)
    return TextSide(tokenizer, template, GenerationDefaults.from_config(checkpoint.generation_config))
