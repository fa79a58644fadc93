"""Prompts of a wanted length that no prefix cache has seen."""

from __future__ import annotations

import random
import string

from attrs import define, field

from freetoken.serve.bench.chat import ChatServer
from freetoken.vocab.errors import EngineError, UsageError

_ALPHABET = string.ascii_lowercase + " "
_SAMPLES = (40, 80)  # characters; short, since a server may treat the first prompt of a length differently


@define
class PromptWriter:
    """Writes random letters, from their first one on, so that two prompts share nothing but the chat template.

    The number of tokens is taken to be ``fixed_tokens + tokens_per_letter × letters``.
    """

    fixed_tokens: float
    tokens_per_letter: float
    _random: random.Random = field(factory=random.Random)

    @classmethod
    async def for_server(cls, server: ChatServer, seed: int | None = None) -> PromptWriter:
        """Learn how the server counts: from its ``/tokenize`` where it has one, else from short requests."""
        source = random.Random(seed)
        counts = [await _count(server, letters(source, n)) for n in _SAMPLES]
        slope = (counts[1] - counts[0]) / (_SAMPLES[1] - _SAMPLES[0])
        if slope <= 0:
            raise EngineError(
                f"the length of prompts at {server.address}", f"it counts {counts} tokens for {_SAMPLES} letters",
                "it must report usage.prompt_tokens in a stream",
            )  # fmt: skip
        return cls(counts[0] - slope * _SAMPLES[0], slope, source)

    def write(self, tokens: int) -> str:
        """A new text that makes a prompt of about ``tokens`` tokens, the chat template counted in."""
        room = (tokens - self.fixed_tokens) / self.tokens_per_letter
        if room < 1:
            raise UsageError(
                f"a prompt of {tokens} tokens", f"this server's chat template takes about {self.fixed_tokens:.0f}",
                "ask for longer prompts",
            )  # fmt: skip
        return letters(self._random, round(room))


def letters(source: random.Random, count: int) -> str:
    """``count`` random letters and blanks, letters at both ends."""
    middle = "".join(source.choices(_ALPHABET, k=max(count - 2, 0)))
    return source.choice(_ALPHABET[:-1]) + middle + source.choice(_ALPHABET[:-1])


async def _count(server: ChatServer, text: str) -> int:
    """Tokens of ``text`` as a prompt."""
    messages = [{"role": "user", "content": text}]
    try:
        answer = await server.post("/tokenize", {"model": server.model, "messages": messages})
        return int(answer["count"])
    except (EngineError, KeyError, ValueError, TypeError):  # no such endpoint, or one of another kind
        return (await server.ask(text, 1)).prompt_tokens
