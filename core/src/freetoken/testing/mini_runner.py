"""Ragged batches through a model without scheduler or cache manager: what the tests of families run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import define, field
from torch import Tensor

from freetoken.plugin.protocols import Step
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.testing.mini_model import PAGE_TOKENS, MiniModel, load_mini_model
from freetoken.vocab.batch import Batch
from freetoken.vocab.cache_spec import CacheSpec, PagedKV, RecurrentState

SEQUENCES = 64


@define
class MiniSequence:
    """One sequence: its pages, state slot and how many tokens it holds."""

    slot: int
    pages: list[int] = field(factory=list)
    tokens: int = 0


class MiniRunner:
    """Runs batches of sequences; every step returns the logits of every new token.

    Pages are handed out in a scattered order and pools start out full of a large number, so that a layer that mistakes
    pages for positions, or reads what it never wrote, is found out.
    """

    def __init__(self, model: MiniModel, *, pages: int = 128) -> None:
        self.loaded = model
        self.spec, self.parts, self.model = model.spec, model.parts, model.model
        self.free_pages: list[int] = torch.randperm(pages, generator=torch.Generator().manual_seed(7)).tolist()
        self.caches = [_pools(cache, pages) for cache in self.spec.caches]
        self.sequences = 0

    @classmethod
    def open(cls, family: ModelFamilySpec, path: Path, *, dtype: str = "float32") -> MiniRunner:
        return cls(load_mini_model(family, path, dtype=dtype))

    def new_sequence(self) -> MiniSequence:
        self.sequences += 1
        return MiniSequence(self.sequences - 1)

    def fork(self, donor: MiniSequence) -> MiniSequence:
        """A sequence that starts from ``donor``'s pages and a copy of its recurrent state, like a prefix hit."""
        assert donor.tokens % PAGE_TOKENS == 0, "only whole pages are shared"
        heir = self.new_sequence()
        heir.pages, heir.tokens = list(donor.pages), donor.tokens
        for spec, pools in zip(self.spec.caches, self.caches, strict=True):
            if isinstance(spec, RecurrentState):
                for pool in pools:
                    pool[heir.slot] = pool[donor.slot]
        return heir

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[MiniSequence, Sequence[int]]]) -> list[Tensor]:
        """Bring each sequence its new tokens, all in one ragged batch → logits ``[new tokens, V]`` for each."""
        batch = self._batch(work)
        step = Step(batch, {name: backend.plan(batch) for name, backend in self.parts.attention.items()}, self.caches)
        if self.parts.moe is not None:
            self.parts.moe.begin_step(batch)
        hidden = self.model.embed(batch)
        for layer in self.model.layers:
            hidden = layer.forward(hidden, step)
        if self.parts.moe is not None:
            self.parts.moe.end_step()
        logits = self.model.head(hidden[batch.logit_rows])
        for sequence, tokens in work:
            sequence.tokens += len(tokens)
        return list(logits.split([len(tokens) for _, tokens in work]))  # type: ignore[no-untyped-call]

    def logits(self, tokens: Sequence[int], chunk: int = 0) -> Tensor:
        """``[T, V]`` of a fresh sequence, brought in chunks of ``chunk`` tokens (0: whole)."""
        sequence, size = self.new_sequence(), chunk or len(tokens)
        return torch.cat([self.step([(sequence, tokens[i : i + size])])[0] for i in range(0, len(tokens), size)])

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """``num_tokens`` tokens after ``prompt``, and the logits ``[num_tokens, V]`` they were chosen from."""
        sequence, new, rows = self.new_sequence(), list(prompt), []
        chosen: list[int] = []
        for _ in range(num_tokens):
            rows.append(self.step([(sequence, new)])[0][-1])
            new = [int(rows[-1].argmax())]
            chosen += new
        return chosen, torch.stack(rows)

    def _batch(self, work: Sequence[tuple[MiniSequence, Sequence[int]]]) -> Batch:
        for sequence, tokens in work:
            while len(sequence.pages) * PAGE_TOKENS < sequence.tokens + len(tokens):
                sequence.pages.append(self.free_pages.pop())
        query = tuple(len(tokens) for _, tokens in work)
        prefix = tuple(sequence.tokens for sequence, _ in work)
        places = [(s, p) for s, tokens in work for p in range(s.tokens, s.tokens + len(tokens))]
        table = torch.zeros(len(work), max(len(s.pages) for s, _ in work), dtype=torch.int32)
        for row, (sequence, _) in zip(table, work, strict=True):
            row[: len(sequence.pages)] = torch.tensor(sequence.pages)
        return Batch(
            query,
            prefix,
            tokens=torch.tensor([t for _, tokens in work for t in tokens]),
            positions=torch.tensor([p for _, p in places]),
            query_starts=torch.tensor((0, *query)).cumsum(0).int(),
            context_lens=torch.tensor([q + p for q, p in zip(query, prefix, strict=True)], dtype=torch.int32),
            page_table=table,
            kv_slots=torch.tensor([s.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for s, p in places]),
            state_slots=torch.tensor([s.slot for s, _ in work]),
            logit_rows=torch.arange(len(places)),
        )


def _pools(cache: CacheSpec, pages: int) -> tuple[Tensor, ...]:
    shapes: list[tuple[int, ...]]
    if isinstance(cache, PagedKV):
        shapes = [(pages, PAGE_TOKENS, cache.heads, dim) for dim in (cache.k_dim, cache.v_dim)]
    else:
        shapes = [(SEQUENCES, *shape) for shape in cache.shapes]
    return tuple(torch.full(shape, 1e3, dtype=getattr(torch, cache.dtype)) for shape in shapes)
