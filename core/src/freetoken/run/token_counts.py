"""Which tokens a request's prompt held and how often it generated each, kept on the device from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_SLOTS = 4


class TokenCounts:
    """One slot a request: ``prompt [slots, V] bool`` and ``output [slots, V] i32``; grows by doubling."""

    def __init__(self, vocab_size: int, device: str | torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._prompt, self._output = self._empty(0)
        self._free: list[int] = []

    def open(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """A slot that knows these tokens."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._prompt[slot].zero_()[self._ids(prompt)] = True
        self._output[slot].zero_().index_add_(0, self._ids(output), self._ones(len(output)))
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    def record(self, slots: Tensor, tokens: Tensor) -> None:
        """``slots [R] i64`` each generated one of ``tokens [R] i64``. No slot occurs twice."""
        self._output.index_put_((slots, tokens), self._ones(len(tokens)), accumulate=True)

    def penalise(self, logits: Tensor, slots: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
        """Change ``logits [R, V] f32`` in place; the penalties are ``[R, 1] f32``.

        First, over prompt and output, a positive logit of a token seen is divided by the repetition penalty and a
        negative one multiplied (Keskar et al. 2019, arXiv:1909.05858). Then, over the output alone, ``frequency`` times
        the count and ``presence`` once are subtracted, as in the OpenAI API.
        """
        output = self._output.index_select(0, slots)
        generated = output > 0
        seen = self._prompt.index_select(0, slots) | generated
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        torch.where(seen, scaled, logits, out=logits)
        logits -= output * frequency + generated * presence

    @torch.inference_mode(False)  # so that both modes may write to the slots, whichever made them
    def _grow(self) -> None:
        old = len(self._prompt)
        new = max(_FIRST_SLOTS, old)
        prompt, output = self._empty(new)
        self._prompt, self._output = torch.cat((self._prompt, prompt)), torch.cat((self._output, output))
        self._free = list(range(old + new - 1, old - 1, -1))

    def _empty(self, slots: int) -> tuple[Tensor, Tensor]:
        shape = (slots, self._vocab_size)
        return (
            torch.zeros(shape, dtype=torch.bool, device=self._device),
            torch.zeros(shape, dtype=torch.int32, device=self._device),
        )

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=self._device)

    def _ones(self, count: int) -> Tensor:
        return torch.ones(count, dtype=torch.int32, device=self._device)
