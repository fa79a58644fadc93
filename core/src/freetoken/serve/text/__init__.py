"""Text on its way in and out: tokenizer, chat template, detokeniser, stop strings, the checkpoint's sampling wishes."""

from freetoken.serve.text.chat_template import ChatTemplate
from freetoken.serve.text.detokenise import IncrementalDetokenizer
from freetoken.serve.text.generation_defaults import GenerationDefaults
from freetoken.serve.text.stop_strings import StopStrings
from freetoken.serve.text.tokenizer import TextTokenizer

__all__ = ["ChatTemplate", "GenerationDefaults", "IncrementalDetokenizer", "StopStrings", "TextTokenizer"]
